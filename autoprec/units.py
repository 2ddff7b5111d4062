"""Decision units: which modules of a model share one format, under which name, and what they may run in.

A unit is a layer that owns parameters, or several that share one (tied weights), or, with ``granularity="block"``, the
layers of one repeated block. What lives here is discovery; running a unit in a format is the work of ``layers``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from autoprec.formats import FORMATS, rank
from autoprec.hardware import native_formats
from autoprec.lookalike import plain_class

_NORMS = tuple(
    getattr(nn, name) for name in ("LayerNorm", "GroupNorm", "LocalResponseNorm", "RMSNorm") if hasattr(nn, name)
)
_WHOLE = (nn.MultiheadAttention, nn.RNNBase)
_HOLDERS = (nn.ParameterList, nn.ParameterDict)
_ALL_FORMATS = tuple(FORMATS)
_CAST_FORMATS = ("fp32", "bf16", "fp16")


@dataclass
class Unit:
    """Modules that change their format together.

    Attributes:
        name: Fully qualified name of the first module.
        kind: ``"linear"``, ``"conv"``, ``"embedding"``, ``"rnn"``, ``"attention"``, ``"norm"``, ``"block"`` or
            ``"other"``.
        modules: The modules, in the model's order.
        names: Their fully qualified names, all of them where a module is registered more than once.
        legal: Formats that the unit can run in, widest first. Only ``("fp32",)`` if it is left alone.
        native: The part of ``legal`` that the device computes itself for this kind of layer.
        parameter_count: Parameters of the unit, shared ones counted once.
        has_matrix: Whether the unit multiplies by a weight matrix or looks one up; ``"*"`` selects these.
        depth: Position in the model, 0 (first) to 1 (last).
        reason: Why the unit is left alone, ``None`` if it is steered.
        parameters: Its parameters.
        states: Filled by ``layers`` while a fit steers the unit.
        implemented: Calls in training that an implementation other than torch's own ran, by its name.
        ran: Calls in training under tf32, fp8 or int8, counted by that format and by the one that ran.
        has_run: Whether anybody has called one of the modules in a step that was steered; compiled calls do not count.
    """

    name: str
    kind: str
    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    legal: tuple[str, ...] = _ALL_FORMATS
    native: tuple[str, ...] = ("fp32",)
    parameter_count: int = 0
    has_matrix: bool = False
    depth: float = 0.0
    reason: str | None = None
    parameters: tuple[nn.Parameter, ...] = field(default=(), repr=False)
    states: list[Any] = field(default_factory=list, repr=False, compare=False)
    ran: Counter[tuple[str, str]] = field(default_factory=Counter, repr=False, compare=False)
    implemented: Counter[str] = field(default_factory=Counter, repr=False, compare=False)
    has_run: bool = field(default=False, repr=False, compare=False)

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter requires a gradient now; finetuning may freeze and unfreeze in mid-run."""
        return not any(parameter.requires_grad for parameter in self.parameters)

    def is_emulated(self, format_name: str) -> bool:
        """Whether the device at hand only emulates ``format_name``."""
        return format_name not in self.native


def find_units(
    root: nn.Module,
    device: torch.device | None = None,
    granularity: str = "layer",
) -> list[Unit]:
    """Finds the decision units of a model.

    Args:
        root: The model. Its own direct parameters form a unit that is left alone, because they are used where no
            forward can be intercepted.
        device: Where the model will run; decides what is native. Default CPU.
        granularity: ``"layer"``, or ``"block"`` to give the layers with weight matrices of each repeated block one
            format.

    Returns:
        Units in the model's order; names are stable as long as the module's attribute names are.

    Raises:
        ValueError: If ``granularity`` is unknown.
    """
    if granularity not in ("layer", "block"):
        raise ValueError(f"Passed `granularity={granularity!r}`. `granularity` must be 'layer' or 'block'.")
    device = device or torch.device("cpu")
    aliases = _aliases(root)
    units = [_leaf_unit(name, module, root, aliases) for name, module in _owners(root)]
    units = _merge_tied(units)
    if granularity == "block":
        units = _merge_blocks(units, root)
    native = native_formats(device)
    if "fp16" not in native:
        units = [replace(unit, legal=_without_fp16(unit)) for unit in units]
    last = max(len(units) - 1, 1)
    return [replace(unit, native=_native_formats(unit, native), depth=index / last) for index, unit in enumerate(units)]


# what the device has is used by these kinds alone; the others round
_ONLY_LINEAR = ("tf32", "fp8", "int8")


def _native_formats(unit: Unit, device: Collection[str]) -> tuple[str, ...]:
    is_linear = all(kind_of(module) == "linear" for module in unit.modules)
    return tuple(
        name for name in unit.legal if name == "fp32" or (name in device and (is_linear or name not in _ONLY_LINEAR))
    )


def _without_fp16(unit: Unit) -> tuple[str, ...]:
    """Recurrent layers have no fp16 on a CPU; torch's own are emulated, a subclass's forward cannot be."""
    if any(isinstance(m, nn.RNNBase) and type(m) not in (nn.RNN, nn.LSTM, nn.GRU) for m in unit.modules):
        return tuple(name for name in unit.legal if name != "fp16")
    return unit.legal


def select(units: Sequence[Unit], pattern: str) -> list[Unit]:
    """Returns the units that a key of ``Action.precision`` names.

    Args:
        units: All units.
        pattern: A unit's name (any of its modules' names for tied units), an fnmatch pattern over names, or ``"*"`` for
            every steered unit that computes with a weight matrix. A pattern that meets such units leaves out the norms
            and vectors among them; one that meets nothing else (``"*.norm1"``) names those.
    """
    if pattern == "*":
        return [unit for unit in units if unit.has_matrix and unit.reason is None]
    exact = [unit for unit in units if pattern == unit.name or pattern in unit.names]
    if exact:
        return exact
    hits = [unit for unit in units if any(fnmatchcase(name, pattern) for name in (unit.name, *unit.names))]
    return [unit for unit in hits if unit.has_matrix] or hits


def resolve(
    units: Sequence[Unit], precision: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Resolves the keys of ``Action.precision``; an exact name beats a pattern, a later pattern an earlier one.

    Args:
        units: All units.
        precision: Format name by unit name or pattern.

    Returns:
        Format by unit name; for each unit that was named exactly, all formats asked for (several if tied layers were
        asked for different ones); keys that name no unit.
    """
    asked: dict[str, str] = {}
    exact: dict[str, list[str]] = {}
    missing: list[str] = []
    for pattern, requested in precision.items():
        hits = select(units, pattern)
        if not hits and pattern != "*":
            missing.append(pattern)
        for unit in hits:
            if pattern == unit.name or pattern in unit.names:
                exact.setdefault(unit.name, []).append(requested)
            asked[unit.name] = exact[unit.name][-1] if unit.name in exact else requested
    return asked, exact, missing


def _clean(name: str) -> str:
    """Drops the wrapper that ``torch.compile`` puts into a name."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _owners(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that own parameters, without those that belong to another one (parts of an attention ...)."""
    inside: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        is_whole = isinstance(module, (*_WHOLE, torch.jit.ScriptModule)) and module is not root
        if is_whole:
            inside.append(name + ".")
        if is_parametrized(module):
            inside.append((name + "." if name else "") + "parametrizations.")
        if isinstance(module, _HOLDERS):
            continue
        if is_whole or is_parametrized(module) or _owns_parameters(module):
            yield name, module


def _owns_parameters(module: nn.Module) -> bool:
    if any(parameter is not None for parameter in module._parameters.values()):
        return True
    return any(isinstance(child, _HOLDERS) and any(True for _ in child.parameters()) for child in module.children())


def _own_parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    if isinstance(module, _WHOLE):
        return tuple(module.parameters())
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    for name, child in module.named_children():
        if isinstance(child, _HOLDERS) or (name == "parametrizations" and is_parametrized(module)):
            own.extend(child.parameters())
    return tuple(own)


def _aliases(root: nn.Module) -> dict[int, list[str]]:
    """All names of every module; one that is registered twice answers to both."""
    names: dict[int, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(_clean(name))
    return names


def _leaf_unit(name: str, module: nn.Module, root: nn.Module, aliases: Mapping[int, Sequence[str]]) -> Unit:
    parameters = _own_parameters(module)
    kind = kind_of(module)
    reason = _reason_to_leave(module, root)
    is_leaf = isinstance(module, _WHOLE) or not any(_owns_parameters(child) for child in _descendants(module))
    matrix_kinds = ("linear", "conv", "embedding", "rnn", "attention")
    clean = _clean(name) or "(root)"
    return Unit(
        name=clean,
        kind=kind,
        modules=(module,),
        names=tuple(alias or clean for alias in aliases[id(module)]),
        legal=("fp32",) if reason else _legal_formats(kind, module),
        parameter_count=sum(_numel(parameter) for parameter in parameters),
        has_matrix=kind in matrix_kinds or (kind == "other" and is_leaf and any(p.ndim >= 2 for p in parameters)),
        reason=reason,
        parameters=parameters,
    )


def _descendants(module: nn.Module) -> Iterator[nn.Module]:
    parametrized = is_parametrized(module)
    for name, child in module.named_children():
        if isinstance(child, _HOLDERS) or (parametrized and name == "parametrizations"):
            continue
        yield from child.modules()


def _numel(parameter: nn.Parameter) -> int:
    return 0 if isinstance(parameter, nn.parameter.UninitializedParameter) else parameter.numel()


def kind_of(module: nn.Module) -> str:
    """Returns the kind of a single layer, one of those that ``Unit.kind`` lists but ``"block"``."""
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (nn.MultiheadAttention, "attention"),
        ((nn.RNNBase, nn.RNNCellBase), "rnn"),
        (nn.Linear, "linear"),
        (_ConvNd, "conv"),
        ((nn.Embedding, nn.EmbeddingBag), "embedding"),
        ((*_NORMS, _NormBase), "norm"),
    )
    for classes, kind in kinds:
        if isinstance(module, classes):
            return kind
    # models bring their own normalisation layers (LlamaRMSNorm ...): known by name and by having only vectors
    if "norm" in type(module).__name__.lower() and all(p.ndim <= 1 for p in module.parameters(recurse=False)):
        return "norm"
    return "other"


def _legal_formats(kind: str, module: nn.Module) -> tuple[str, ...]:
    if not is_exact(module):
        return _CAST_FORMATS
    if kind == "linear":
        sizes = (module.in_features, module.out_features)
        without_fp8 = tuple(name for name in _ALL_FORMATS if name != "fp8")
        return _ALL_FORMATS if all(isinstance(s, int) and s % 16 == 0 for s in sizes) else without_fp8
    if kind == "conv":
        return _ALL_FORMATS
    if kind == "embedding" and isinstance(module, nn.Embedding):
        return tuple(name for name in _ALL_FORMATS if name != "tf32")
    return _CAST_FORMATS


_EXACT = (
    nn.Linear,
    nn.Embedding,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def is_exact(module: nn.Module) -> bool:
    """Whether the module is exactly a torch layer whose forward ``layers`` may replace: no subclass, no own forward."""
    return plain_class(module) in _EXACT and "forward" not in module.__dict__ and not is_parametrized(module)


def _reason_to_leave(module: nn.Module, root: nn.Module) -> str | None:
    if module is root:
        return "its own parameters are used outside any forward that can be intercepted"
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module has no Python forward to intercept"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "lazy parameters are not initialised yet; run one forward before `fit`"
    if type(module).forward is nn.Module.forward:
        return "it has no forward that can be intercepted; its parameters are used by other modules"
    if "forward" in module.__dict__:
        return "its `forward` is replaced on the instance"
    if any(parameter.is_complex() for parameter in _own_parameters(module)):
        return "complex parameters are never rounded"
    if any(not p.is_floating_point() or p.dtype.itemsize < 4 for p in _own_parameters(module)):
        return "its weights are stored in less than 32 bits"
    if any(p.dtype is torch.float64 for p in _own_parameters(module)):
        return "its weights are stored in float64"
    return None


def _merge_tied(units: list[Unit]) -> list[Unit]:
    """Unites units that share a parameter: one weight has one format."""
    owner: dict[int, int] = {}
    groups: list[list[Unit]] = []
    for unit in units:
        hits = sorted({owner[id(p)] for p in unit.parameters if id(p) in owner})
        target = hits[0] if hits else len(groups)
        if not hits:
            groups.append([])
        for other in hits[1:]:
            groups[target].extend(groups[other])
            groups[other] = []
        groups[target].append(unit)
        for member in groups[target]:
            owner.update({id(p): target for p in member.parameters})
    return [_union(group) for group in groups if group]


def _union(members: Sequence[Unit], name: str | None = None, kind: str | None = None) -> Unit:
    first = members[0]
    if len(members) == 1 and name is None:
        return first
    parameters = tuple({id(p): p for member in members for p in member.parameters}.values())
    reasons = [member.reason for member in members if member.reason]
    common = [f for f in _ALL_FORMATS if all(f in member.legal for member in members)]
    return replace(
        first,
        name=name or first.name,
        kind=kind or first.kind,
        modules=tuple(module for member in members for module in member.modules),
        names=tuple(n for member in members for n in member.names),
        legal=("fp32",) if reasons else tuple(sorted(common, key=rank)),
        parameter_count=sum(_numel(parameter) for parameter in parameters),
        has_matrix=any(member.has_matrix for member in members),
        reason=reasons[0] if reasons else None,
        parameters=parameters,
    )


def _merge_blocks(units: list[Unit], root: nn.Module) -> list[Unit]:
    """Groups the matrix units of each repeated block (equal classes side by side in a list of modules)."""
    prefixes = [_clean(name) for name in _block_names(root)]
    merged: list[Unit] = []
    members: dict[str, list[Unit]] = {}
    for unit in units:
        block = next((p for p in prefixes if all(n.startswith(p + ".") for n in unit.names)), None)
        if block is None or not unit.has_matrix or unit.reason is not None:
            merged.append(unit)
            continue
        if block not in members:
            members[block] = []
            merged.append(replace(unit, name=block))
        members[block].append(unit)
    return [_union(members[u.name], u.name, "block") if u.name in members else u for u in merged]


def _block_names(root: nn.Module) -> list[str]:
    """Names of the outermost repeated blocks."""
    names: list[str] = []
    for name, module in root.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(name.startswith(n + ".") for n in names):
            continue
        children = list(module.named_children())
        classes = {type(child) for _, child in children}
        has_layers = all(any(True for _ in child.children()) for _, child in children)
        if len(children) > 1 and len(classes) == 1 and has_layers:
            names.extend(f"{name}.{child}" if name else child for child, _ in children)
    return names
