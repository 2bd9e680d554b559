"""Disciplines of consistency: what data-parallel workers wait for, as stored in a plan.

Data-parallel workers need not take every step together. A *discipline* says what a worker waits for, and with which
weights it computes if it does not wait. This file only declares disciplines; :mod:`asa.executor.consistency` implements
them.

- *Bulk-synchronous*: every step waits for every worker (``ps_sync``; ``ddp`` itself).
- *Stale-synchronous* (after Ho et al. 2013): no gradient gets older than ``window`` global batches (``ps_bounded``).
- *Asynchronous* (Recht et al. 2011, Dean et al. 2012): no worker waits (``ps_async``, ``downpour``, ``hogwild``).
- *Local*: workers train independently for ``period`` steps, then average (``local_sgd``, ``diloco``, ``fedavg``).
- *Pipelined*: stages begin the next batch before the last one's update has arrived (``pipedream``).

>>> parse("ps_bounded:window=2").max_age
3
>>> str(parse("diloco:period=100:message=int8"))
'diloco:period=100:message=int8'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args

from asa.errors import UsageError
from asa.ir.codec import noun

DisciplineName = Literal[
    "ps_sync", "ps_async", "ps_bounded", "downpour", "hogwild", "local_sgd", "diloco", "fedavg", "pipedream"
]
Waiting = Literal["bulk", "stale", "asynchronous", "local", "pipelined"]
Placement = Literal["beside", "own"]
Message = Literal["fp32", "int8"]

NAMES: tuple[DisciplineName, ...] = get_args(DisciplineName)

WAITING: Mapping[DisciplineName, Waiting] = {
    "ps_sync": "bulk",
    "ps_async": "asynchronous",
    "ps_bounded": "stale",
    "downpour": "asynchronous",
    "hogwild": "asynchronous",
    "local_sgd": "local",
    "diloco": "local",
    "fedavg": "local",
    "pipedream": "pipelined",
}

WAITS_FOR: Mapping[DisciplineName, str] = {
    "ps_sync": "every worker waits in every step until the servers have the gradients of all",
    "ps_async": "nobody waits: a server applies every gradient as it comes",
    "ps_bounded": "a worker waits while a gradient in flight is window global batches old",
    "downpour": "nobody waits: a worker pushes and pulls every period steps",
    "hogwild": "nobody waits: workers of one host write to the same memory without locks",
    "local_sgd": "workers meet every period steps and average their weights",
    "diloco": "workers meet every period steps; an outer optimizer takes a step along the mean of their changes",
    "fedavg": "some clients train on data of their own for period steps, then weights are averaged by samples",
    "pipedream": "a stage goes on with weights one update old; nobody waits for the pipeline to drain",
}
"""What a worker waits for, by discipline."""

CHANGES: Mapping[DisciplineName, str] = {
    "ps_sync": "nothing: the same gradients in the same steps, applied at the servers",
    "ps_async": "each step applies one worker's gradients, to weights newer than those they were computed with",
    "ps_bounded": "gradients are applied one worker at a time, to weights at most window global batches newer",
    "downpour": "gradients of period steps are applied at once, to weights newer than those they were computed with",
    "hogwild": "workers read weights while others write them, and updates may overwrite one another",
    "local_sgd": "workers' weights differ between meetings; gradients are never averaged, weights are",
    "diloco": "workers' weights differ between meetings; an outer optimizer decides where they start again",
    "fedavg": "clients see only data of their own, and some rounds leave some of them out",
    "pipedream": "every gradient is computed with weights one update old",
}
"""How training under each discipline differs from plain data parallelism."""

PARAMETERS: Mapping[DisciplineName, Mapping[str, Any]] = {
    "ps_sync": {"servers": 1, "placement": "beside"},
    "ps_async": {"servers": 1, "placement": "beside", "momentum": None},
    "ps_bounded": {"servers": 1, "placement": "beside", "window": 3, "max_age": None, "momentum": None},
    "downpour": {"servers": 1, "placement": "beside", "period": 4, "momentum": None},
    "hogwild": {"momentum": None},
    "local_sgd": {"period": 4, "growth": 0.0, "quorum": None, "grace_s": 1.0, "groups": None},
    "diloco": {
        "period": 50, "outer_rate": 0.7, "outer_momentum": 0.9, "fragments": 1, "overlap": 0, "message": "fp32",
        "quorum": None, "grace_s": 1.0, "groups": None,
    },
    "fedavg": {
        "period": 10, "fraction": 1.0, "spread": 0.0, "message": "fp32", "quorum": None, "grace_s": 1.0,
    },
    "pipedream": {},
}  # fmt: skip
"""Parameters of every discipline, with their default values."""


@noun
class Held:
    """What a rank holds for a discipline beyond plain training on its own samples, in multiples of the bytes of its
    weights. ``lasting``: all the time. ``exchanged``: also while ranks exchange, when a rank holds gradients and no
    activations. Below 0, it holds less."""

    lasting: float = 0.0
    exchanged: float = 0.0


@noun
class Discipline:
    """A discipline of consistency and its parameters. Parameters that the discipline does not have are at their
    defaults.

    Attributes:
        period: optimizer steps of a worker between two averages, or between two pushes; 1 to ``LONGEST``.
        growth: coefficient of the quadratic synchronization rule (Gu et al. 2024): a period that begins at learning
            rate r has ``max(period, floor((growth / r)**2))`` steps; 0 for a fixed period.
        window: largest age, in global batches, of a gradient in flight before other workers wait for it. With 0 every
            step waits for all workers. None if no worker waits.
        max_age: gradients older than this are rejected; None if none is. The age of a gradient is the number of whole
            global batches of *other* workers' gradients that were applied since its worker fetched the weights.
        servers: number of parameter servers. Each holds about the same number of bytes of the weights.
        momentum: momentum of SGD at servers whose workers do not wait for all others, instead of the run's own. None:
            the run's own less the momentum that asynchrony of ``workers`` workers adds, ``1 - 1 / workers`` (Mitliagkas
            et al. 2016, "Asynchrony begets momentum"), and at least 0.
        placement: servers are ``beside`` the first workers, in their processes, or on ranks of their ``own``, the last
            ones.
        outer_rate, outer_momentum: learning rate and momentum of the outer optimizer, which is SGD, with Nesterov
            momentum if ``outer_momentum`` is above 0.
        fragments: number of parts of the weights; one of them is averaged every ``period / fragments`` steps.
        overlap: number of steps that a worker computes while an average is on its way; 0 if it waits. Less than
            ``period / fragments``.
        message: number format of the messages when averaging: ``fp32``, or ``int8`` with one scale per tensor.
        quorum: number of workers that an average needs; None for all. With a quorum it waits ``grace_s`` more seconds
            for the others.
        fraction: fraction of the clients that take part in a round, above 0 and at most 1.
        groups: number of equally large groups of ranks. Each group is one worker and trains under a synchronous plan;
            ranks with the same position in their groups average. None: every rank is a worker.
        spread: how different the clients' data are: 0 for equal distributions, otherwise classes follow a Dirichlet
            distribution of concentration ``1 / spread``.
    """

    name: DisciplineName
    period: int = 1
    growth: float = 0.0
    window: int | None = None
    max_age: int | None = None
    servers: int = 0
    momentum: float | None = None
    placement: Placement = "beside"
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    fragments: int = 1
    overlap: int = 0
    message: Message = "fp32"
    quorum: int | None = None
    grace_s: float = 0.0
    fraction: float = 1.0
    spread: float = 0.0
    groups: int | None = None

    def __post_init__(self) -> None:
        name, allowed = self.name, PARAMETERS[self.name]
        for field in fields(self):
            if field.name != "name" and field.name not in allowed and getattr(self, field.name) != field.default:
                raise UsageError(f"{name} has no {field.name}; {_has(name)}")
        least = dict.fromkeys(
            (
                "growth",
                "window",
                "max_age",
                "outer_rate",
                "outer_momentum",
                "momentum",
                "grace_s",
                "fraction",
                "spread",
                "overlap",
            ),
            0,
        ) | dict.fromkeys(("period", "fragments", "quorum"), 1)
        least["groups"] = 2
        least["servers"] = 1 if "servers" in allowed else 0
        for word, bound in least.items():
            value = getattr(self, word)
            if value is not None and not bound <= value < float("inf"):
                raise UsageError(f"{name}: {word} is {value}; it must be at least {bound}")
        for word, momentum in (("outer_momentum", self.outer_momentum), ("momentum", self.momentum or 0.0)):
            if momentum >= 1:
                raise UsageError(f"{name}: {word} is {momentum}; it must be below 1")
        if self.window == 0 and self.momentum is not None:
            raise UsageError(
                f"{name}: with window=0 no gradient is late, and servers have the optimizer's own momentum; leave out "
                f"momentum={self.momentum:g}, or take a larger window"
            )
        if not self.outer_rate > 0:
            raise UsageError(f"{name}: outer_rate is {self.outer_rate}; it must be above 0")
        if not 0 < self.fraction <= 1:
            raise UsageError(f"{name}: fraction is {self.fraction}; it must be above 0 and at most 1")
        if self.quorum is not None and self.groups is not None:
            raise UsageError(f"{name}: a quorum counts workers of one rank each; leave out groups={self.groups}")
        if self.quorum is not None and (self.fraction < 1 or self.spread > 0):
            raise UsageError(
                f"{name}: with a quorum, whoever is ready gets the next samples: leave out fraction and spread, or "
                "quorum"
            )
        if self.quorum is not None and self.fragments > 1:
            raise UsageError(
                f"{name}: a quorum meets for all weights at once, asked for {self.fragments} fragments too"
            )
        if self.overlap and (self.quorum is not None or self.overlap >= self.period // self.fragments):
            remedy = (
                "leave out quorum" if self.quorum is not None else
                f"it must be less than the {self.period // self.fragments} steps from one average to the next"
            )  # fmt: skip
            raise UsageError(f"{name}: overlap is {self.overlap}; {remedy}")
        if self.period > LONGEST:
            raise UsageError(f"{name}: period is {self.period}; it must be at most {LONGEST}")
        if self.period % self.fragments:
            raise UsageError(
                f"{name}: {self.fragments} fragments in a period of {self.period} steps; the period must be a multiple "
                "of the fragments"
            )

    @property
    def waiting(self) -> Waiting:
        """The kind of waiting, such as ``bulk`` or ``local``."""
        return WAITING[self.name]

    @property
    def lockstep(self) -> bool:
        """Whether all workers take the same steps, each on a share of the same global batch."""
        return (self.waiting in ("bulk", "local", "pipelined") and self.quorum is None) or self.window == 0

    @property
    def own_moments(self) -> bool:
        """Whether workers keep optimizer states of their own, of which a checkpoint has rank 0's."""
        return self.name == "hogwild" or self.quorum is not None

    @property
    def served(self) -> bool:
        """Whether servers hold the weights and the optimizer's state."""
        return self.servers > 0

    @property
    def synchronous(self) -> bool:
        """Whether servers apply the gradients of all workers as one update."""
        return self.name == "ps_sync" or (self.name == "ps_bounded" and self.window == 0 and self.max_age == 0)

    def exact(self, optimizer: str) -> bool:
        """Whether training with ``optimizer`` equals plain data parallelism up to rounding: either every step has the
        gradients of all workers, or averaging weights gives the same result."""
        if self.synchronous:
            return True
        if self.name not in ("local_sgd", "diloco", "fedavg") or optimizer != "sgd":
            return False
        if self.fraction < 1 or self.spread > 0:
            return False
        plain = self.outer_rate == 1 and self.outer_momentum == 0 and self.message == "fp32" and self.quorum is None
        return self.period == 1 and self.growth == 0 and plain

    def period_at(self, rate: float) -> int:
        """Steps until the next average, at learning rate ``rate``.

        >>> [Discipline(name="local_sgd", period=4, growth=0.2).period_at(r) for r in (0.1, 0.05, 0.02)]
        [4, 16, 100]
        """
        if not self.growth:
            return self.period
        return max(self.period, int((self.growth / rate) ** 2 + 1e-9)) if rate > 0 else MOST_STEPS

    def momentum_at(self, momentum: float, workers: int) -> float:
        """Momentum of SGD at the servers of ``workers`` workers, if the run's own is ``momentum``.

        >>> [round(parse("ps_async").momentum_at(0.9, n), 3) for n in (1, 2, 4, 16)]
        [0.9, 0.4, 0.15, 0.0]
        """
        if self.waiting == "bulk" or self.window == 0:
            return momentum
        return max(0.0, momentum - (1 - 1 / workers)) if self.momentum is None else self.momentum

    def group_size(self, ranks: int, inside: tuple[str, ...] | None) -> int:
        """Number of ranks of a group among ``ranks`` ranks. ``inside``: strategies asked for inside it; None: any.

        Raises:
            UsageError: a group is one device, and every strategy inside needs several.
        """
        count = self.workers(ranks)
        if ranks == count and inside is not None and not {"asa", "hybrid", "single"} & set(inside):
            names = ", ".join(inside)
            raise UsageError(
                f"{self} makes {count} groups of 1 device of {ranks}, {names} needs at least 2 in a group; "
                f"take --gpus {2 * count}, or leave {names} out"
            )
        return ranks // count

    def workers(self, ranks: int) -> int:
        """Number of workers among ``ranks`` ranks: ranks that are not servers, or groups.

        Raises:
            UsageError: more servers than ranks, too few workers for the quorum, or ranks that do not form equal groups.
        """
        if self.groups is not None:
            if ranks % self.groups:
                fitting = max((g for g in range(2, self.groups) if ranks % g == 0), default=None)
                remedy = "leave groups out" if fitting is None else f"ask for groups={fitting}"
                raise UsageError(f"{self.name}: {ranks} ranks do not make {self.groups} equal groups; {remedy}")
            return self.groups
        separate = self.servers if self.placement == "own" else 0
        if self.servers > ranks or separate >= ranks:
            room = "ranks of their own beside at least 1 worker" if separate else "ranks"
            most = ranks - (separate > 0)
            remedy = f"servers={most}" if most else "placement=beside"
            raise UsageError(
                f"{self.name}: {self.servers} servers need as many {room}, the number of ranks is {ranks}; "
                f"ask for {remedy} or more ranks"
            )
        if self.quorum is not None and self.quorum > ranks:
            raise UsageError(
                f"{self.name}: a quorum of {self.quorum} of {ranks} workers; ask for quorum={ranks} or less"
            )
        return ranks - separate

    def server_ranks(self, ranks: int) -> tuple[int, ...]:
        """The ranks of the servers, in order."""
        workers = self.workers(ranks)
        first = workers if self.placement == "own" else 0
        return tuple(range(first, first + self.servers))

    def held(self, rank: int, ranks: int, words: float, largest: float = 0.0) -> Held:
        """What ``rank`` of ``ranks`` holds. ``words``: state of the optimizer per weight; ``largest``: share of the
        largest parameter in all weights. Files are those of ``asa/executor/consistency``.

        A worker of servers has no optimizer state; it exchanges its gradients as one vector, and the new weights
        (``parameter_servers.py``). A server has its part of the weights and the optimizer's state, and for every other
        worker a gradient or the weights of a reply, with one sum or reply more (``server.py``). Workers that average
        have a vector of what they average; with an outer optimizer also the weights at the last average, its momentum,
        a copy of the weights and their change (``local_sgd.py``, ``diloco.py``); in int8, those of all workers twice.

        >>> parse("ps_sync").held(0, 2, words=1), parse("ps_sync").held(1, 2, words=1)
        (Held(lasting=3.0, exchanged=2.0), Held(lasting=-1.0, exchanged=2.0))
        """
        workers, outer = self.workers(ranks), float(self.outer_momentum > 0)
        if self.waiting == "pipelined":
            return Held(lasting=2.0 if ranks > 1 else 0.0)  # the versions of two batches in flight (pipedream.py)
        if self.served:
            works, others = rank < workers, workers - (rank < workers)
            lasting = ((self.period > 1) - words) * works
            if rank in self.server_ranks(ranks):
                lasting += (1 + words + others + (others > 0)) / self.servers
            return Held(lasting=float(lasting), exchanged=2.0 * works)
        int8 = self.message == "int8"
        if self.quorum is not None:
            lasting = 1.0 + (1 + outer + workers if rank == 0 else 0.0)
            return Held(lasting=lasting, exchanged=3.5 if int8 else 2.0)
        if self.name == "local_sgd":
            return Held(exchanged=max(1.0, words))
        if self.waiting == "local":
            part = min(1.0, 1 / self.fragments + (largest if self.fragments > 1 else 0.0))
            copies = 3.25 + 2.25 * workers if int8 else 3.0
            sent = 1.0 + (0.25 * (workers + 1) if int8 else 1.0) if self.overlap else 0.0  # weights of then, messages
            return Held(lasting=1.0 + outer + sent * part, exchanged=max(copies * part, words))
        return Held()

    def check(self, compression: str, precision: str) -> None:
        """Check the settings of a plan that no discipline runs with.

        Raises:
            UsageError: gradients are compressed, or the precision is fp16.
        """
        if compression != "none" or precision == "fp16":
            setting = f"compression {compression}" if compression != "none" else "precision fp16"
            raise UsageError(f"{self.name} does not run with {setting}; leave that out")

    def __str__(self) -> str:
        usual = _filled(self.name, {} if self.window is None else {"window": self.window})
        idle = {"grace_s"} if self.quorum is None and not self.grace_s else set()
        values = ((k, getattr(self, k)) for k in PARAMETERS[self.name] if k not in idle)
        plain = {k: getattr(usual, k) for k in PARAMETERS[self.name]} | {"window": PARAMETERS[self.name].get("window")}
        return ":".join([self.name, *(f"{k}={v}".lower() for k, v in values if v != plain[k])])


LONGEST = 1_000_000
"""Largest period in steps. Workers meet at the end of every epoch anyway."""
MOST_STEPS = 1_000_000_000
"""A number of steps larger than in any run, as a period that never ends."""


def _has(name: DisciplineName) -> str:
    return f"it has {', '.join(PARAMETERS[name])}" if PARAMETERS[name] else "it has no parameters"


def _filled(name: DisciplineName, parameters: Mapping[str, Any]) -> Discipline:
    values = {**PARAMETERS[name], **parameters}
    if name == "ps_bounded" and "max_age" not in parameters and values["window"] is not None:
        values["max_age"] = values["window"] + 1  # Ringmaster's threshold: just above the window
    return Discipline(name=name, **values)


def bearable_one_late(momentum: float) -> float:
    """Largest stable learning rate of SGD with gradients that are one update old, as a fraction of the rate without
    delay.

    On a quadratic of curvature c with momentum m, SGD is stable up to ``rate * c = 2 (1 + m)`` without delay, and up to
    ``rate * c = 1 - m`` with it.

    >>> [round(1 / bearable_one_late(m), 1) for m in (0.0, 0.5, 0.9)]
    [2.0, 6.0, 38.0]
    """
    return (1 - momentum) / (2 * (1 + momentum))


def is_discipline(text: str) -> bool:
    """Whether ``text`` names a discipline, with or without parameters."""
    return text.partition(":")[0] in NAMES


def parse(text: str) -> Discipline:
    """The discipline in ``NAME[:PARAMETER=VALUE]...``, with default values for other parameters.

    Raises:
        UsageError: no such name or parameter, or an impossible value.
    """
    name, *pairs = text.split(":")
    if name not in NAMES:
        raise UsageError(f"no discipline {name!r}; one of {', '.join(NAMES)}")
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in PARAMETERS[name] or key in values:
            twice = " twice" if key in values else ""
            raise UsageError(f"{text!r}: {pair!r}{twice} is not a parameter of {name} with a value; {_has(name)}")
        values[key] = _value(text, key, value)
    return _filled(name, values)


def _value(text: str, key: str, value: str) -> Any:
    """``value`` converted to the type of the field ``key``."""
    kind = next(f.type for f in fields(Discipline) if f.name == key)
    choices = {"Placement": get_args(Placement), "Message": get_args(Message)}.get(str(kind))
    if choices is not None:
        if value not in choices:
            raise UsageError(f"{text!r}: {key} is one of {', '.join(choices)}, not {value!r}")
        return value
    if value == "none" and "None" in str(kind):
        return None
    try:
        return float(value) if "float" in str(kind) else int(value)
    except ValueError:
        expected = "a number" if "float" in str(kind) else "a whole number"
        raise UsageError(f"{text!r}: {key} is {expected}, not {value!r}") from None
