"""A batched simulation of large fleets. Every request is drawn, placed and followed until its last
token, but many requests at a time, with NumPy, and with an approximation of Baton's policy.

- :mod:`.cell`, :mod:`.sample`: a small cluster that is simulated exactly, and whose requests a
  fleet's requests are drawn from
- :mod:`.simulation`: slices of time, from arrivals to ended answers
- :mod:`.dispatcher`: several conductors that place what has arrived
- :mod:`.placement`: the approximation of the policy, for a batch of requests
- :mod:`.state`, :mod:`.backlog`, :mod:`.decode_pool`: the workers and their requests
- :mod:`.conductors`: what conductors know of them
- :mod:`.failures`, :mod:`.outages`, :mod:`.autoscaling`: what changes the workers
- :mod:`.statistics`: results by hour
"""
