"""The kinds of workers: what a worker of each role does, and which program it runs.

Whoever asks what a worker can do asks its row in :data:`WORKER_KINDS`, and does not compare its
role. So a new kind is a role, a row and a program.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.core.states import Role

ENGINE_PROGRAM = "command_line.worker_program:build"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """What the workers of one role do: see :data:`WORKER_KINDS`. A worker that does only one of
    ``computes_prompts`` and ``writes_answers`` needs workers that do the other, and the KV cache of
    each request moves between them. ``program`` is the function that builds the worker's program
    from the settings and the role."""

    role: Role
    computes_prompts: bool
    writes_answers: bool
    program: str = ENGINE_PROGRAM

    @property
    def abilities(self) -> tuple[bool, bool]:
        """Whether a worker computes prompts, and whether it writes answers."""
        return self.computes_prompts, self.writes_answers

    @property
    def serves_alone(self) -> bool:
        """Whether a worker serves whole requests."""
        return self.computes_prompts and self.writes_answers

    @property
    def exports_kv(self) -> bool:
        """Whether others write the answers to the prompts that a worker computes."""
        return self.computes_prompts and not self.writes_answers

    @property
    def imports_kv(self) -> bool:
        """Whether a worker writes the answers to prompts that others have computed."""
        return self.writes_answers and not self.computes_prompts

    @property
    def runs_engine(self) -> bool:
        """Whether a worker's process has Baton's engine. Such workers can change their role to that
        of each other, read and write blocks of the KV store, and have mock workers."""
        return self.program == ENGINE_PROGRAM


WORKER_KINDS: Mapping[Role, WorkerKind] = {
    kind.role: kind
    for kind in (
        WorkerKind(role=Role.PREFILL, computes_prompts=True, writes_answers=False),
        WorkerKind(role=Role.DECODE, computes_prompts=False, writes_answers=True),
        WorkerKind(role=Role.MIXED, computes_prompts=True, writes_answers=True),
    )
}
"""The kinds by role; each has a pool per model. Their order is that of tables and messages. Read it
when it is needed and copy nothing from it into constants, so that tests can add a kind."""


def runs_engine(role: str) -> bool:
    """Whether processes of a role, which may be any program's, run Baton's engine."""
    return role in WORKER_KINDS and WORKER_KINDS[Role(role)].runs_engine


def list_kinds(
    form: str = "{}",
    conjunction: str = "and",
    can: Callable[[WorkerKind], bool] = lambda kind: True,
) -> str:
    """Return the roles of the kinds of which ``can`` is true, each in ``form``, as text for people:
    ``prefill, decode and mixed``."""
    names = [form.format(role.value) for role, kind in WORKER_KINDS.items() if can(kind)]
    return f" {conjunction} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def can_serve(sizes: Mapping[Role, int]) -> bool:
    """Return whether requests can be served by pools of these sizes: by workers that serve whole
    requests, or by workers that compute prompts and others that write answers, which need each
    other, or by both."""
    kinds = [WORKER_KINDS[role] for role, size in sizes.items() if size]
    has_exports, has_imports = any(k.exports_kv for k in kinds), any(k.imports_kv for k in kinds)
    return has_exports == has_imports and bool(kinds)


def serving_problem(sizes: Mapping[Role, int]) -> str:
    """Say why pools of these sizes could not serve requests; empty if they can."""
    if can_serve(sizes):
        return ""
    shown = " ".join(f"{role.value}={sizes.get(role, 0)}" for role in WORKER_KINDS)
    exporting = list_kinds(conjunction="or", can=lambda kind: kind.exports_kv)
    importing = list_kinds(conjunction="or", can=lambda kind: kind.imports_kv)
    alone = list_kinds(conjunction="or", can=lambda kind: kind.serves_alone)
    return (
        f"{shown} could not serve requests: there must be {exporting} and {importing} workers, or "
        f"{alone} workers, and no {exporting} workers without {importing} workers or the reverse"
    )
