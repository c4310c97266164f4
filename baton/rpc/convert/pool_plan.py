"""Conversion of a conductor's plan of the pools' sizes between protobuf and ``baton.core``."""

from itertools import islice

from baton.core.pool_plan import MAX_POOL_ALTERNATIVES, PoolAlternative, PoolPlan
from baton.rpc.v1 import conductor_pb2 as pb


def pool_plan_to_proto(plan: PoolPlan | None) -> pb.PoolPlan | None:
    if plan is None:
        return None
    return pb.PoolPlan(
        prefill=plan.prefill,
        decode=plan.decode,
        reason=plan.reason,
        serving_prefill=plan.serving_prefill,
        serving_decode=plan.serving_decode,
        requests_per_second=plan.requests_per_second,
        prompt_tokens=plan.prompt_tokens,
        answer_tokens=plan.answer_tokens,
        cached_share=plan.cached_fraction,
        alternatives=[
            pb.PoolAlternative(
                pool=each.pool, num_workers=each.num_workers, utilisation=each.utilisation
            )
            for each in plan.alternatives
        ],
    )


def pool_plan_from_proto(message: pb.DescribeResponse) -> PoolPlan | None:
    if not message.HasField("plan"):
        return None
    plan = message.plan
    return PoolPlan(
        plan.prefill,
        plan.decode,
        plan.reason,
        plan.serving_prefill,
        plan.serving_decode,
        plan.requests_per_second,
        plan.prompt_tokens,
        plan.answer_tokens,
        plan.cached_share,
        tuple(
            PoolAlternative(each.pool, each.num_workers, each.utilisation)
            for each in islice(plan.alternatives, MAX_POOL_ALTERNATIVES)
        ),
    )
