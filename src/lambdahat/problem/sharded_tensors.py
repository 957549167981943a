"""Parameters that ``fully_shard`` (FSDP2) has spread over ranks: taken whole, and modules
without its hooks.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of one of which each rank holds a part; then every rank must
    ask.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    with torch.no_grad():
        gathered: Tensor = tensor.full_tensor()
        return gathered.detach()


class Gathered:
    """Tensors by name, those that are spread over ranks taken whole and kept.

    Every rank must ask for them at the same time, and ranks do not pass over the same number of
    batches: ``refresh`` is for where they are together. No version tells of all that training
    writes to a part, so that it takes all again.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._spread = [name for name, tensor in tensors.items() if hasattr(tensor, "full_tensor")]
        self.refresh()

    def refresh(self) -> None:
        """Take those that are spread as they are now."""
        self._kept = {name: whole(self._tensors[name]) for name in self._spread}

    def __call__(self) -> dict[str, Tensor]:
        """All of them by name, as they were at the last ``refresh`` or, where they are not
        spread, are now.
        """
        return {**self._tensors, **self._kept}


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the model or a part of it."""
    return any(map(_sharding, model.modules()))


def without_sharding(model: nn.Module) -> nn.Module:
    """The modules as they were before ``fully_shard``, which forbids copies, with the same
    sharded parameters.
    """
    reshard(model)
    return _plain(model, {})


def reshard(model: nn.Module) -> None:
    """Give up what a forward pass has gathered, so that the parameters are the sharded ones."""
    for module in model.modules():
        if _sharding(module):
            module.reshard()  # type: ignore[operator]


def coarsest(model: nn.Module) -> torch.dtype | None:
    """The coarsest dtype that ``fully_shard`` was told to compute or to add gradients up in;
    None where in none.
    """
    states = [module._get_fsdp_state() for module in model.modules() if _sharding(module)]  # type: ignore[operator]
    policies = [getattr(state, "_mp_policy", None) for state in states]
    found = [
        getattr(policy, name, None)
        for policy in policies
        for name in ("param_dtype", "reduce_dtype")
    ]
    return max(
        (dtype for dtype in found if dtype is not None),
        key=lambda dtype: torch.finfo(dtype).eps,
        default=None,
    )


def _sharding(module: nn.Module) -> bool:
    # importing it takes long, and who uses it has done so
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _plain(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    kind = type(module)
    # fully_shard makes a class of (FSDPModule, the module's own)
    other: nn.Module = object.__new__(kind.__mro__[2] if _sharding(module) else kind)
    made[id(module)] = other
    kept = {
        name: value
        for name, value in module.__dict__.items()
        if not name.startswith("__composable_api")
    }
    for name in ("_parameters", "_buffers", *CALL_HOOKS):
        kept[name] = copy.copy(kept[name])
    for name in CALL_HOOKS:
        for key in [key for key, hook in kept[name].items() if _of_sharding(hook)]:
            del kept[name][key]
    for name in STATE_HOOKS:  # of no use in a copy that is only called
        kept[name] = OrderedDict()
    children = {name: child and _plain(child, made) for name, child in module._modules.items()}
    other.__dict__.update(kept, _modules=children)
    return other


def _of_sharding(hook: object) -> bool:
    return type(getattr(hook, "__self__", None)).__name__ == "FSDPState"
