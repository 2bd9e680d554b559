"""A rank's part of a model, used like the original: the first result of ``asa.parallelize``."""

from __future__ import annotations

import contextlib
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from asa.api.calls import Call, lengths, plain
from asa.api.losses.outputs import Demands, entering, leaving
from asa.api.losses.terms import Terms, follow_backwards, mark_output, record_call, whole_parameters
from asa.api.losses.trial import Trial
from asa.api.messages import say
from asa.api.model.attributes import WHOLES, splits_layers, traced_through, watched_attributes
from asa.api.model.model_interface import ModelInterface
from asa.api.model.notes import drawing, drawing_by_share, of_changed_buffers
from asa.api.model.optimizers import hand_over
from asa.api.model.own_methods import own_methods
from asa.api.plans.planning import check_plain
from asa.api.rank_context import RankContext, meet_at
from asa.api.steps.batches import GlobalBatches, Share, fingerprints, moved
from asa.api.steps.in_step import FORWARD, OTHER_ROWS, UPDATE
from asa.api.steps.registrations import REPLACED, watch_registrations
from asa.api.tensors import collectives
from asa.api.tensors.clipping import understood_by_torch
from asa.api.tensors.names import StateNames
from asa.api.tensors.numbers import patch_sharded_tensors
from asa.api.tensors.parameter_tools import understood_by_torch as tools_understood_by_torch
from asa.api.tensors.retired import retire
from asa.api.tensors.views import TensorViews
from asa.errors import AsaError, UsageError, place_of
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.parameter_hooks import refuse_hooks, replaced
from asa.executor.model.state import full_gradients, load_full_gradients
from asa.ir.layout import bounds
from asa.ir.plan import Plan
from asa.sharding.layers.batchnorm import counted, synchronised
from asa.sharding.split import TensorPart
from asa.tracing.preserve import preserved
from asa.tracing.records import hides_tensors, numbers_in
from asa.tracing.surroundings import Surroundings
from asa.tracing.tracer import reason_of
from asa.tracing.whole import WholeModel, tensors_of


def local_rows(total: int, ranks: int, rank: int, least: int = 1) -> list[int]:
    """Rows of a batch of ``total`` samples that a rank computes: its share, or a single row if there are fewer samples
    than ranks. If a share had fewer than ``least`` rows, every rank computes the whole batch, which counts once."""
    if 1 < least <= total < least * ranks:
        return list(range(total))
    if total < ranks:
        return [rank % total] if total else []
    return list(range(*bounds(total, ranks, rank)))


def check_new(model: nn.Module) -> None:
    """Check that no part of ``model`` was distributed before, before any rank waits for another.

    Raises:
        UsageError: one was, by this package or by torch.
    """
    check_plain(model)
    if any(isinstance(m, DistributedModel) and m.parallel is not None for m in model.modules()):
        raise UsageError(
            "the model is one that asa.parallelize returned: call it once for each model, and evaluate over a loader "
            "of your own, which every rank reads whole"
        )


def distributed_models() -> list[DistributedModel]:
    """Models that several ranks share, as long as they exist."""
    return [m for m in _models if m.parallel is not None and m.rank_context.ranks > 1]


def _keeps_nothing_of_inference(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, a call of a model, under ``no_grad`` instead of ``inference_mode``: what ranks keep from it (gathered
    parameters) could not be written again in training."""

    @wraps(run)
    def wrapped(model: Any, *args: Any, **options: Any) -> Any:
        if model.parallel is None or not torch.is_inference_mode_enabled():
            return run(model, *args, **options)
        with torch.inference_mode(False), torch.no_grad():
            return run(model, *args, **options)

    return wrapped


class DistributedModel(ModelInterface):
    """One rank's part of a model, called like the model: ``model(x)`` with this rank's samples returns their outputs.

    Collective unless every rank computes independently: all ranks must make the same calls. ``plan``: the plan it runs
    under; ``origin`` is the original model, whose weights may have been moved.
    """

    calls: int
    """Number of calls in training, by which layers draw."""
    demands: Demands | None
    rebuild_whole: Callable[[DistributedModel, str], ParallelModel] | None
    """Function that rebuilds the model to run as a whole, given a reason; None if that is impossible."""
    parameter_ids: list[tuple[int | str, ...]] | None
    """Identities of the parameters at the time when the model was distributed."""
    optimizers: Sequence[Optimizer]
    traced: dict[str, tuple[nn.Module, bool, dict[str, Any]]]
    """Layers that do not run themselves, whether nothing of their class does, and their attributes so far."""
    reader: int | None
    """The thread that reads the loader now."""
    coupled: bool
    """Whether the model computes a sample's output from other samples."""
    most: int
    """Largest number of samples in a call of the model."""
    computed: int
    """Number of samples that all ranks computed in the last call."""
    calls_of_batch: list[int]
    """Numbers of samples in the calls of the model for the batch so far."""
    awaiting: int
    """Number of backwards before the last call whose outputs have gradients."""

    def __init__(
        self,
        parallel: ParallelModel | None,
        context: RankContext,
        *,
        origin: nn.Module,
        names: StateNames | None = None,
        rebuild_whole: Callable[[DistributedModel, str], ParallelModel] | None = None,
    ) -> None:
        super().__init__()
        self.__dict__.update(rank_context=context, names=names, rebuild_whole=rebuild_whole, parameter_ids=None)
        self.__dict__.update(share=None, calls=0, _evaluations=0, mean_weight=1.0, mean_rows=0, watch=None)
        self.__dict__["in_step"] = None
        self.__dict__["optimizers"] = ()
        self.__dict__.update(output_factor=1.0, learned=True, warned_of_other_batches=False, coupled=False, least=[1])
        self.__dict__.update(reader=None, traced={}, calls_of_batch=[], awaiting=-1, most=0, beside=False)
        self.__dict__["computed"] = 0
        self.plan: Plan | None = None
        self.parts = nn.ModuleList([] if parallel is not None else [origin])
        self._independent = True
        self._averages = self._computes_alone = self._warned_of_parts = self._warned_of_norms = False
        self._warned_of_leaving = self._told_of_changed = False
        self._said_of_added = self._said_of_draws = self._said_of_shares = False
        self.adopt(parallel)
        self.__dict__["trial"] = Trial(self) if parallel is not None and context.ranks > 1 else None
        self.__dict__["terms"] = Terms(context.votes) if parallel is not None and context.ranks > 1 else None
        self.__dict__["origin"] = origin
        this = ref(self)

        def forward(*args: Any, **options: Any) -> Any:
            me = this()
            assert me is not None
            return DistributedModel.forward(me, *args, **options)

        self.__dict__["forward"] = wraps(origin.forward)(forward)  # frameworks look at the names of what it takes
        self.register_load_state_dict_post_hook(ModelInterface.loaded_around)
        self.__dict__.update(own_methods(self, origin, shared=parallel is not None))
        _models.add(self)

    def adopt(self, parallel: ParallelModel | None) -> None:
        """Use ``parallel`` from now on."""
        demands, views = (None, None) if parallel is None else (Demands(parallel), TensorViews(parallel))
        self.__dict__.update(parallel=parallel, demands=demands, views=views)
        if parallel is not None:
            self.plan = parallel.plan
            parallel.updating = self._updating
            self.parts = nn.ModuleList(parallel.components)
            understood_by_torch(parallel)
            collectives.understood_by_torch()
            patch_sharded_tensors(parallel.parameters())
            tools_understood_by_torch(list(self.parameters()))
            refuse_hooks(parallel.parameters())
            self._independent = all(layout.data == self.rank_context.ranks for layout in parallel.layouts)
            self.__dict__["_averages"] = self._independent and not any(map(replaced, parallel.plan.components))
            self.__dict__["_computes_alone"] = self._averages and not any(
                synchronised(c, perhaps=True) for c in parallel.components
            )

    @_keeps_nothing_of_inference
    def forward(self, *args: Any, **options: Any) -> Any:
        """The model's own output for this rank's samples, with any inputs. A model that is cut into components takes
        one tensor; if called with anything else it runs whole from then on."""
        parallel, device = self.parallel, self.rank_context.device
        if (
            parallel is not None
            and self.rank_context.ranks > 1
            and torch._C._functorch.peek_interpreter_stack() is not None
        ):
            raise UsageError(
                "torch.func transforms (grad, vmap, jvp) give a rank what its own samples make of its own part of the "
                "model; use loss.backward() and p.grad, or compute that in a plain copy: load model.state_dict()"
            )
        if parallel is not None and (torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()):
            raise UsageError(
                "the model is traced (torch.jit.trace, torch.export, a writer's add_graph), and ranks share it: trace "
                "copy.deepcopy(model), which is a plain model, made on every rank"
            )
        if parallel is not None and parallel.called:
            return self.call(None, args, options)
        splits = self.views is not None and any(self.views.splits)
        if splits and any(isinstance(p, TensorPart) for p in self.parts.parameters()):
            raise UsageError(
                "torch.func.functional_call hands the model whole parameters, and ranks compute with parts of them: "
                "plan with strategies=('ddp',), or call a plain copy (copy.deepcopy(model))"
            )
        given = args, options
        args, options = self._handed(args, options)
        args, options = moved(args, device), moved(options, device)
        self._check_recomputing(None)
        if parallel is None:
            record_call(self)
            return self.parts[0](*args, **options)
        self._prepared()
        x = args[0] if len(args) == 1 and not options else None
        if not isinstance(x, Tensor):
            call = plain(self.origin, args, options)
            x = call.tensor
            if x is None:
                self.run_whole(f"it is called with {call}")
                return self.call(None, *given)
        traced = parallel.components[0].input_shape
        if not self._independent and x.dim() != 1 + len(traced):
            # Splits and exchanges were traced for inputs with this number of dimensions.
            self.run_whole(f"it is called with {Call((x,))}, and was planned for {['N', *traced]}")
            return self.call(None, *given)
        try:
            total, weight, first = self._total(len(x), x)
        except Uneven as error:
            self.run_whole(str(error))
            return self.call(None, *given)
        factor = self._weight_of_outputs(weight, total)
        self.__dict__["output_factor"] = factor
        self._count(total, weight)
        self.__dict__["computed"] = total
        samples = torch.arange(total)
        samples = first + (samples % self.share.total if self._whole and self.share is not None else samples)
        if not self.learns and total == len(x) * self.rank_context.ranks:  # a loader that every rank reads whole
            samples = samples % max(1, len(x))
        with self._leaving(factor), self._together(), self._few(len(x), (x,), {}):
            value, sides = parallel.compute(entering(x, factor), samples, self._number)
        self._called(weight, len(x))

        def weighed(tensor: Tensor) -> Tensor:
            return self._weighed(tensor, factor, len(x), (x,))

        return parallel.traced.assemble(weighed(value), {name: weighed(side) for name, side in sides.items()})

    @contextlib.contextmanager
    def _leaving(self, factor: float) -> Iterator[None]:
        """Context in which a program is told once if the model, whose outputs are weighed by ``factor``, leaves tensors
        with gradients elsewhere, which are not."""
        if factor == 1 or self._warned_of_leaving or not torch.is_grad_enabled():
            yield
            return
        whole = [c.__dict__["_whole"] for c in self.parts if isinstance(c, WholeModel)]
        tops = [top for top in (self.origin, *self.parts, *whole) if top is not None]
        modules = {(n, id(m)): m for top in tops for n, m in top.named_modules()}
        around = Surroundings(modules.values())
        before = {id(m): dict(vars(m)) for m in modules.values()}
        yield
        attributes = (
            f"model.{n}.{k}" for (n, _), m in modules.items() for k, t in vars(m).items()
            if n and isinstance(t, Tensor) and t.grad_fn is not None and before[id(m)].get(k) is not t
        )  # fmt: skip
        if name := around.left() or next(attributes, ""):
            self._warned_of_leaving = True
            warnings.warn(
                f"the model's forward leaves tensors with gradients in {name}: in a loss they count otherwise than on "
                "one device if ranks have unlike numbers of samples, as in this batch; return them from forward beside "
                "the output, use drop_last=True, or plan with strategies=('ddp',)",
                stacklevel=6,
            )

    def _check_recomputing(self, method: str | None) -> None:
        """Check that a call within a backward, which computes the model again (``torch.utils.checkpoint``), can give
        what it gave before.

        Raises:
            UsageError: it draws other random numbers, or is of a layer.
        """
        if self.parallel is None or not _in_backward() or (method is None and not self._draws()):
            return
        raise UsageError(
            f"{'the model' if method is None else f'model.{method}'} is computed again in a backward "
            "(torch.utils.checkpoint in the loop), "
            f"{'and draws other random numbers then' if method is None else 'and layers cannot be'}: have checkpoints "
            "within the model's forward"
        )

    def _draws(self) -> bool:
        assert self.parallel is not None
        return self.training and (self.parallel.draws or bool(drawing(self.parallel)))

    def _handed(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's inputs as plain tensors, because its own operations are not recorded."""
        if self.trial is not None:
            args, options = self.trial.handed((args, options))
            self.trial.trusted = False
        return args, options

    @_keeps_nothing_of_inference
    def call(self, method: str | None, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Result of a method (None: ``forward``) of a model that runs whole, for this rank's samples."""
        parallel, share = self.parallel, self.share
        assert parallel is not None
        self._check_recomputing(method)
        args, options = moved(self._handed(args, options), self.rank_context.device)
        self._prepared()
        candidates = lengths((args, options))
        share_rows = None if share is None or not self.learns else len(share.rows)
        rows = (
            share_rows
            if share_rows is not None and (share_rows in candidates or not candidates)
            else next(iter(candidates), 1)
        )
        total, weight, first = self._total(rows, (args, options))
        if share is not None and rows == share_rows:
            samples = torch.tensor(share.rows) + share.first
        else:
            samples = torch.arange(first, first + rows)
        factor = self._weight_of_outputs(weight, total)
        args, options = pytree.tree_map(
            lambda leaf: entering(leaf, factor) if isinstance(leaf, Tensor) else leaf, (args, options)
        )
        if method is not None:
            options = {**options, "method": method}
        drew, before = parallel.draws, self._buffers_before()
        self._count(total, weight)
        with self._leaving(factor), self._together(), self._few(rows, args, options):
            output = parallel.call(samples, self._number, total, *args, **options)
        self._tell_of_changed(before)
        if parallel.draws and not drew:
            say(self.rank_context, "the model draws random numbers in forward, others for other samples: the same "
                "under every plan, and others than without asa")  # fmt: skip
        self._called(weight, rows)
        if hidden := hides_tensors(output):
            raise UsageError(
                f"the model returns a {hidden}, whose tensors cannot be found, as it has more than tensors, numbers "
                "and texts: return a tensor, or tensors in a tuple, list, dictionary or dataclass"
            )
        if self.trial is not None and not self._whole and numbers_in(output):
            self.trial.note_number()
        self.__dict__["output_factor"] = factor
        given = [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        return pytree.tree_map(
            lambda leaf: self._weighed(leaf, factor, rows, given) if isinstance(leaf, Tensor) else leaf, output
        )  # fmt: skip

    def _buffers_before(self) -> dict[str, tuple[Tensor, int]]:
        """Buffers and their versions before the first call in training: how the model is called may not have been known
        before, nor what it changes."""
        if not self.training or self._told_of_changed:
            return {}
        norms = {id(b) for m in self.parts.modules() if isinstance(m, _BatchNorm) for b in m.buffers(recurse=False)}
        return {n: (b, b._version) for n, b in self.parts[0].named_buffers() if id(b) not in norms}

    def _tell_of_changed(self, before: dict[str, tuple[Tensor, int]]) -> None:
        """Warn once of the buffers ``before`` a call that it changed, if nothing was said of them."""
        if not self.training or self._told_of_changed or self.parallel is None:
            return
        self._told_of_changed = True
        now = dict(self.parts[0].named_buffers())
        changed = {n: b.dtype for n, (b, version) in before.items() if now.get(n) is not b or b._version != version}
        changed = {n: kind for n, kind in changed.items() if n not in self.parallel.changed}
        for line in of_changed_buffers(self.parallel.plan, (), changed, "exact") if self.rank_context.rank == 0 else ():
            warnings.warn(line, stacklevel=5)

    def _count(self, total: int, weight: float) -> None:
        """Exclude samples that count on another rank from BatchNorm over all ranks; warn once where this is
        impossible."""
        counted(weight > 0 or not self._independent)
        total = total if self.share is None else self.share.total
        few = total < self.rank_context.ranks or self._whole
        if self._independent or not few or not self.training or self._warned_of_norms:
            return
        norms = any(isinstance(m, _BatchNorm) and m.training for m in self.parts.modules())
        if norms or self.coupled:
            self._warned_of_norms = True
            what = "BatchNorm over all ranks" if norms else "what the model computes over its batch"
            warnings.warn(
                f"a batch of {total} samples on {self.rank_context.ranks} ranks: {what} counts some of them twice "
                "under this plan, which one device does not; use drop_last=True, or strategies=('ddp',)",
                stacklevel=5,
            )

    @property
    def learns(self) -> bool:
        """Whether a call may need gradients: in training mode, and for the loader's batches also in evaluation mode, in
        which some programs train (frozen statistics, no dropout)."""
        return self.training or (torch.is_grad_enabled() and self.share is not None)

    def _prepared(self) -> None:
        """Prepare for averaging gradients in evaluation mode."""
        if self.reader not in (None, threading.get_ident()) and self.in_step is not None and not _in_backward():
            self.in_step.end(
                "the loader is read by one thread and the model called by another: ranks exchange numbers behind each "
                "batch, in the order of one thread; read the loader where the model is called, and let its workers "
                "(num_workers, prefetch_factor) read ahead"
            )
        self.check_states()
        if self.parallel is not None and self.parallel.training != self.training:
            self.parallel.follow(self.training)
        if self.parallel is not None and self.learns and not self.training:
            self.parallel.reduction.begin()

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Context for a forward. Ranks wait for each other in it if they hold parts of the model, or if norms are
        global."""
        return (
            contextlib.nullcontext() if self._computes_alone or self.in_step is None else self.in_step.together(FORWARD)
        )

    @contextlib.contextmanager
    def _few(self, rows: int, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
        """Context for a forward with ``rows`` samples.

        Raises:
            UsageError: it fails because this rank has too few samples of a batch.
        """
        try:
            yield
        except (AsaError, _StopRecomputationError):
            raise
        except Exception as error:  # whatever a model's own code raises
            share = self.share
            if (
                share is None
                or rows != len(share.rows)
                or rows >= share.total
                or not self._runs_on_whole_batch(args, options, share)
            ):
                raise
            if self.in_step is not None:
                self.in_step.leave()
            raise UsageError(
                f"the model fails on {rows} samples ({reason_of(error)}{place_of(error)}), which this rank has of a "
                f"batch of {share.total}, and not on as many as one device has: use larger batches, or drop_last=True"
            ) from error

    def _runs_on_whole_batch(self, args: tuple[Any, ...], options: dict[str, Any], share: Share) -> bool:
        """Whether the model runs on the number of samples of the whole batch. If ranks hold parts of it, this is not
        tried: the result is whether an earlier call had more samples than this rank has now."""
        rows, total = len(share.rows), share.total
        if not self._computes_alone:
            whole = any(t.shape[:1] == (total,) for t in tensors_of((args, options)))
            return self.most > rows or whole

        def more(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (rows,):
                return leaf
            return leaf.detach().as_subclass(Tensor)[torch.arange(total, device=leaf.device) % rows]

        args, options = pytree.tree_map(more, (args, options))
        try:
            with contextlib.ExitStack() as stack:
                for component in self.parts:
                    stack.enter_context(preserved(component))
                stack.enter_context(torch.no_grad())
                assert self.parallel is not None
                if self.parallel.called:
                    self.parts[0](*args, **options)
                    return True
                value = args[0]
                for component in self.parts:
                    value = component(value)[0]
        except Exception:
            return False
        return True

    def _updating(self) -> contextlib.AbstractContextManager[None]:
        """Context for an exchange of updates, in which ranks wait for each other."""
        return contextlib.nullcontext() if self.in_step is None else self.in_step.together(UPDATE)

    def as_output(self, value: Tensor) -> Tensor:
        """A tensor that the last call left in an attribute of the model, treated as one of its outputs."""
        assert self.parallel is not None
        return self._weighed(self.parallel.left(value, self.computed), self.output_factor, self.mean_rows)

    def run_whole(self, why: str) -> None:
        """Continue as one component that is called like the model (collective).

        Raises:
            UsageError: that is not possible, or outputs of the model as it was wait for their backward.
        """
        if self.rebuild_whole is None:
            raise UsageError(
                f"the plan cuts the model into components, which take one tensor, and {why}: say so before with "
                "example_input (a tuple of inputs, or a dictionary of them by name)"
            )
        assert self.parallel is not None
        meet_at("a change by which the model runs whole")
        gradients = {n: p.grad for n, p in self.named_parameters(remove_duplicate=False) if p.grad is not None}
        held = any(map(replaced, self.parallel.plan.components))
        if self.calls_of_batch and self.awaiting == self.backwards:
            raise UsageError(
                f"{why}, so the model is to run whole, and outputs of its call before wait for their backward: say "
                "what it takes with example_input (a tuple of inputs, or a dictionary of them by name)"
            )
        full = full_gradients(self.parallel, zeros=False) if held else {}
        assert self.names is not None
        full = {alike: g for name, g in full.items() for alike in self.names.alike.get(name, [name])}
        # Layers that the components lack are still those of the original.
        training = self.training
        lists = [list(m.named_parameters(remove_duplicate=False)) for m in (self.origin, self)]
        self.adopt(self.rebuild_whole(self, why))
        load_full_gradients(self.parallel, full)
        now = dict(self.named_parameters(remove_duplicate=False))
        for before in map(dict, lists):
            hand_over(before, now)
            retire(before, now)
        for name, gradient in () if held else gradients.items():
            if name in now and now[name].shape == gradient.shape:
                now[name].grad = gradient
        self.__dict__["rebuild_whole"] = None
        self.remember()
        self.train(training)

    def _weight_of_outputs(self, weight: float, total: int) -> float:
        """Factor for outputs, if gradients are not weighted as a whole when they are averaged."""
        if not self._averages or not torch.is_grad_enabled() or self.parallel is None:
            return weight
        samples_repeat = self.share is not None and (self.share.total < self.rank_context.ranks or self._whole)
        counted = self.share.total if self.share is not None and samples_repeat else total
        meet = weight != 1 and any(map(synchronised, self.parallel.components))
        factor = self.parallel.reduction.weighed(1.0 if meet else weight, counted, not samples_repeat)
        return weight if meet else factor  # gradients that are reduced inside the model must be weighted before

    @property
    def _number(self) -> int:
        """Number of the next call, by which layers draw: below 0 in evaluation, where some may draw, too."""
        return self.calls if self.training else -1 - self._evaluations

    def _called(self, weight: float, rows: int) -> None:
        kind = "calls" if self.training else "_evaluations"
        beside = not self.training and (self.share is None or rows != len(self.share.rows))
        self.__dict__.update({kind: getattr(self, kind) + 1, "beside": beside})
        if not torch.is_grad_enabled() and self.parallel is not None:
            self.parallel.reduction.release()  # a loop may write parameters next, which are shards
        if self.learns:
            self.__dict__.update(mean_weight=weight, mean_rows=rows, most=max(rows, self.most))
        if torch.is_grad_enabled():
            self.__dict__["learned"] = self.training or (self.share is not None and len(self.share.rows) == rows)
            self.__dict__["awaiting"] = self.backwards
            if self.share is not None:
                self.calls_of_batch.append(rows)
        record_call(self)

    def _weighed(self, tensor: Tensor, weight: float, rows: int, given: Sequence[Tensor] = ()) -> Tensor:
        assert self.demands is not None
        begins = tensor.is_leaf and tensor.requires_grad and type(tensor) is Tensor
        if begins and torch.is_grad_enabled() and not any(tensor is g for g in given):
            raise UsageError(
                "the model returns a tensor at which a graph of its own begins (detach().requires_grad_()), and what a "
                "loop reads of it (.grad) is of this rank's samples: detach the output in the loop, and make layers "
                "behind it a model of their own"
            )
        weighted = leaving(tensor, weight, self.demands)
        mark_output(weighted, self)
        followed = self.trial is not None and (self.learns or self.training) and not _in_backward()
        return self.trial.follow(weighted, rows) if followed and self.trial is not None else weighted

    @property
    def _whole(self) -> bool:
        """Whether every rank has all samples of the batch, which count once."""
        return self.share is not None and self.rank_context.ranks > 1 and len(self.share.rows) == self.share.total > 1

    def _total(self, rows: int, inputs: Any) -> tuple[int, float, int]:
        """Number of rows that all ranks compute now, weight of this rank's mean loss, and number of the first row.

        For batches of the loader they are known. For other samples, ranks exchange their numbers. They also exchange
        them in the first batches, and as long as the model gets inputs that are not the loader's.

        Raises:
            Uneven: ranks have other numbers of samples than the plan gives them (raised on all ranks).
        """
        share, ranks = self.share, self.rank_context.ranks
        from_loader = share is not None and self.learns and len(share.rows) == rows
        from_loader = from_loader and (self.training or not self._whole or self._independent)
        learning = torch.is_grad_enabled()
        if self.training and not learning:  # a number of samples that the loop chose may be that of one rank's share
            from_loader = from_loader and self._from_loader(inputs)
        asks = self.in_step is not None and share is not None and self.training and learning
        if self.in_step is not None and asks:
            other = share is None or len(share.rows) != rows  # on some ranks only, perhaps
            self.in_step.derived = self.in_step.derived or other or not self._from_loader(inputs)
            asks = self.in_step.exchanging
        if from_loader and not asks:
            return self._total_of(share)
        if self._independent and not (self.training and learning):
            return rows * ranks, 1.0, 0
        counted = 0.0 if share is not None and not self.weight_now() else 1.0
        figures = [rows, counted, float(from_loader), self._end_of(inputs, rows)]
        by_rank = [figures] if self.in_step is None else self.in_step.figures(OTHER_ROWS, figures)
        if len(by_rank) > 1 and figures[3] and len({f[3] for f in by_rank}) == 1:
            self._say_of_added_samples(rows)
        if from_loader and all(f[2] for f in by_rank):
            return self._total_of(share)
        if any(f[2] for f in by_rank) and self.terms is not None:
            self.terms.count()
        sizes = [int(f[0]) for f in by_rank]
        if share is not None and self.training and torch.is_grad_enabled() and rows < len(share.rows):
            self._warn_of_parts(rows, len(share.rows))
        total = sum(sizes)
        planned = [stop - start for start, stop in (bounds(total, ranks, r) for r in range(ranks))]
        if sizes != planned and not self._independent:
            raise Uneven(f"ranks compute on {sizes} samples at once, and its plan shares {total} as {planned}")
        counting = sum(f[0] * f[1] for f in by_rank)
        return total, counted * rows * ranks / max(counting, 1), 0

    def _end_of(self, inputs: Any, rows: int) -> float:
        """A number for the last sample of a call with more samples than this rank has of the batch; otherwise 0."""
        if self.share is None or not self.training or rows <= len(self.share.rows) or self._said_of_added:
            return 0.0
        leaf = next((t for t in tensors_of(inputs) if t.shape[:1] == (rows,)), None)
        return 0.0 if leaf is None else fingerprints(leaf[-1:].detach().as_subclass(Tensor))[0]

    def _say_of_added_samples(self, rows: int) -> None:
        """Say once that all ranks have the samples that a loop adds to a batch."""
        assert self.share is not None
        self._said_of_added = True
        say(self.rank_context, f"the model is called with {rows} samples, {len(self.share.rows)} of them the loader's, "
            "and ranks have the same others: a mean over all counts those once for every rank; one of their own (a "
            "second term of the loss), or adding them in the loader's collate_fn, does not")  # fmt: skip

    def _total_of(self, share: Share | None) -> tuple[int, float, int]:
        """The result of :meth:`_total` for the loader's batch. In a small batch, some ranks compute a sample that
        counts on another rank."""
        assert share is not None
        ranks = self.rank_context.ranks
        return share.total * ranks if self._whole else max(ranks, share.total), self.weight_now(), share.first

    def _from_loader(self, inputs: Any) -> bool:
        """Whether the inputs of the model are unchanged tensors of the loader."""
        yielded = self.__dict__.get("yielded", ())
        return any(_where(t) in yielded for t in tensors_of(inputs))

    def yields(self, batch: Any) -> None:
        """Record the batch that the loop receives."""
        self.__dict__["calls_of_batch"] = []
        self.__dict__["yielded"] = {_where(t) for t in tensors_of(batch) if t.dim()}

    def _warn_of_parts(self, rows: int, share_rows: int) -> None:
        """Warn once that a piece of a rank's samples does not correspond to a piece on one device."""
        if not self._warned_of_parts:
            self.__dict__["_warned_of_parts"] = True
            warnings.warn(
                f"the model is called with pieces of a batch ({rows} of this rank's {share_rows} samples): one "
                "device's pieces hold other samples. A sum of means over pieces is another where ranks have unlike "
                "numbers of samples, and what goes over the samples of a piece (BatchNorm, weighted losses, ratios) "
                "always is: call the model with all that the loader yields, and have that yield less",
                stacklevel=5,
            )

    def begin(self, mode: bool) -> None:
        """Set training or evaluation mode, with every module as it came."""
        self.__dict__["training"] = mode
        if self.parallel is not None:
            self.parallel.train(mode)

    def alike_in_shape(self, batches: GlobalBatches, batch: Any) -> None:
        """Check that batches have the same shape on all ranks if these exchange activations (collective).

        Raises:
            UsageError: they have not.
        """
        if self._independent or self.parallel is None or not batches.collates_locally:
            return
        shapes = [tuple(t.shape[1:]) for t in tensors_of(batch)]
        checksums = self.rank_context.votes.gather([float(zlib.crc32(repr(shapes).encode()))])
        if len({f[0] for f in checksums}) > 1:
            raise UsageError(
                f"ranks have samples of other shapes than each other (here {shapes}), and this plan has them exchange "
                "activations: pad batches to one length in collate_fn, or plan with strategies=('ddp',)"
            )

    def _parameter_ids(self) -> list[tuple[int | str, ...]]:
        """Identities of the parameters of the original model and of the distributed one; names, if ranks hold
        shards."""
        assert self.parallel is not None
        # Parameter objects that ranks hold in shards are replaced in each step.
        sharded = any(map(replaced, self.parallel.plan.components))
        return [
            tuple(n for n, _ in m.named_parameters(remove_duplicate=False))
            if sharded
            else tuple(id(p) for _, p in m.named_parameters(remove_duplicate=False))
            for m in (self.origin, *self.parallel.components)
        ]

    def remember(self) -> None:
        """Record the current parameters, and hooks of layers. Parameters get the marks that a program put on them."""
        marks = {} if self.names is None else self.names.marks
        for name, p in self.named_parameters():
            for key, value in marks.get(name, {}).items():
                if key not in vars(p) and not key.startswith("_"):
                    setattr(p, key, value)
        self.__dict__["parameter_ids"] = self._parameter_ids()
        self.__dict__["hooks"] = {id(m): _hooks_of(m) for m in self.parts.modules()} | {0: _global_hooks()}
        modules = {id(m): m for top in (self.origin, self.parts) for m in top.modules()}
        self.__dict__["module_ids"] = {*modules, *(id(m._parameters) for m in modules.values())}
        self.__dict__["traced"] = {
            path: (module, gone, watched_attributes(module)) for path, (module, gone) in traced_through(self).items()
        }
        watch_registrations(self)
        follow_backwards()
        if self.in_step is not None:  # a loop may write gradients without a backward
            self.in_step.graded(whole_parameters(self)[0])

    def _warn_of_hooks(self) -> None:
        """Warn once of a hook on a layer that was added behind the call: one on gradients sees those of this rank, and
        gradients through one on outputs may not be weighed."""
        known: dict[int, tuple[int, int]] | None = self.__dict__.get("hooks")
        if known is None or self.parallel is None:
            return
        if splits_layers(self):
            self._hook_wholes(known)
            known = self.hooks
        found = [(n, id(m), _hooks_of(m)) for part in self.parts for n, m in part.named_modules()]
        for name, key, (now, gradients) in (*found, ("all modules", 0, _global_hooks())):
            forward, backward = known.get(key, (0, 0))
            if gradients > backward:
                text = (
                    f"a backward hook on {name} gets gradients of this rank's samples, before ranks have added theirs: "
                    "one that is not linear in them (norms, signs, clamping) gives other numbers than one device; "
                    "change p.grad after backward"
                )
            elif now > forward and (not self._averages or self.parallel.owner):
                text = (
                    f"a forward hook on {name} gets what this rank computes of it: a loss or an update that uses it "
                    "counts otherwise than on one device under a plan that shards or splits the model or its updates; "
                    "return it from forward beside the output, or plan with strategies=('ddp',)"
                )
            else:
                continue
            self.__dict__["hooks"] = None
            warnings.warn(text, stacklevel=4)
            return

    def _hook_wholes(self, known: dict[int, tuple[int, int]]) -> None:
        """Have the model run whole if a forward hook was added to a layer, of which ranks may hold a part (collective).
        ``known``: hooks that there were before."""
        hooked = {
            name: module
            for part in self.parts
            for name, module in part.named_modules()
            if _hooks_of(module)[0] > known.get(id(module), (0, 0))[0]
        }
        if not hooked:
            return
        kept = {
            name: {key: v for key, v in vars(m).items() if key.startswith("_forward_")} for name, m in hooked.items()
        }
        self.run_whole(f"model.{next(iter(hooked))} has a hook, {WHOLES}")
        for name, hooks in kept.items():
            vars(self.origin.get_submodule(name)).update(hooks)  # the same dictionaries, so that handles remove them
        self.remember()

    def say_of_draws(self) -> None:
        """Say once that layers draw random numbers: a rate of dropout may be set later."""
        if self.parallel is not None and not self._said_of_draws and (names := drawing(self.parallel)):
            self._said_of_draws = True
            say(self.rank_context, f"{names} draws random numbers by sample and step: the same under every plan, and "
                "others than without asa")  # fmt: skip
        if self.parallel is not None and not self._said_of_shares and (line := drawing_by_share(self.parallel)):
            self._said_of_shares = True
            say(self.rank_context, line)

    def _warn_of_attributes(self) -> None:
        """Warn of an attribute of a layer that was changed, and that what runs has as it was when it was traced."""
        for path, (module, gone, was) in self.traced.items():
            now = watched_attributes(module)
            if now != was:
                key = next(k for k in (*now, *was) if now.get(k) != was.get(k))
                self.traced[path] = module, gone, now
                name = f"model.{path}.{key}" if path else f"model.{key}"
                if key[0] == " ":
                    name = f"{key[1:]}, which the forward of {path or 'the model'} names,"
                warnings.warn(
                    f"{name} was changed behind asa.parallelize: what was traced of the model before does "
                    "not see it; make it a buffer, and fill that (module.buffer.fill_(value))",
                    stacklevel=4,
                )

    def unchanged(self) -> None:
        """Check that no parameter was replaced since the model was distributed.

        Raises:
            UsageError: one was replaced or tied.
        """
        if (
            self.parallel is not None
            and self.training
            and self.parameter_ids is not None
            and self.parameter_ids != self._parameter_ids()
        ):
            raise UsageError(f"a parameter of the model {REPLACED}")
        self._warn_of_hooks()
        self._warn_of_attributes()
        self.say_of_draws()

    def batch_ended(self, number: int, *, last: bool, indexed: bool) -> None:
        """Check that all ranks made the same calls for batch ``number`` of an epoch (collective)."""
        if self.in_step is None or self.parallel is None:
            return
        self._warn_of_attributes()
        have = 0 if self.share is None else len(self.share.rows)
        self.in_step.single = len(self.calls_of_batch) == have > 1 and have not in self.calls_of_batch
        # A rank that is ahead checks the counts first, so that it does not enter another collective.
        wait = last or not indexed or not self._computes_alone
        asks = self.trial is not None and self.trial.asks
        if self.in_step.after_batch(self.parallel, self.optimizers, number, asks=asks, wait=wait, edge=last):
            for model in distributed_models():
                if model.trial is not None:
                    model.trial.check_again()

    @property
    def backwards(self) -> int:
        """Number of backwards in this process."""
        return 0 if self.in_step is None else self.in_step.backwards

    def epoch_ended(self) -> None:
        """Average running statistics over all ranks; called by the loader at its end (collective)."""
        parallel = self.parallel
        if parallel is not None and self.training:
            parallel.average_buffers()

    def close(self) -> None:
        """Destroy the plan's process groups (collective)."""
        parallel = self.parallel
        self.__dict__["module_ids"] = set()
        if parallel is not None:
            parallel.close()


class Uneven(AsaError):
    """Ranks have samples in other proportions than their plan."""


def _in_backward() -> bool:
    """Whether this thread runs a backward."""
    return int(torch._C._current_graph_task_id()) != -1  # type: ignore[attr-defined]


def _hooks_of(module: nn.Module) -> tuple[int, int]:
    """Numbers of hooks of a module: on its inputs and outputs, and on their gradients."""
    forward = len(module._forward_hooks) + len(module._forward_pre_hooks)
    return forward, len(module._backward_hooks) + len(module._backward_pre_hooks)


def _global_hooks() -> tuple[int, int]:
    """Numbers of hooks of all modules of the process, as in :func:`_hooks_of`."""
    forward = len(module_hooks._global_forward_hooks) + len(module_hooks._global_forward_pre_hooks)
    return forward, len(module_hooks._global_backward_hooks) + len(module_hooks._global_backward_pre_hooks)


def _where(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    if tensor.layout is not torch.strided:
        return id(tensor), tuple(tensor.shape), ()
    plain = tensor.as_subclass(Tensor)
    return plain.data_ptr(), tuple(plain.shape), plain.stride()


_models: WeakSet[DistributedModel] = WeakSet()
