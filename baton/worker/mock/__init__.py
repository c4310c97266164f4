"""Mock workers, which have no model: they speak the protocol of real workers at a configured speed.
One process can run hundreds of them."""
