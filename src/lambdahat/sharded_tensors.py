"""Parameters that ``fully_shard`` (FSDP2) has spread over ranks: taken whole, and modules without its hooks."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict

from torch import Tensor, nn

CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of one of which each rank holds a part; then every rank must ask."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather().detach()


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the model or a part of it."""
    return any(map(_sharding, model.modules()))


def without_sharding(model: nn.Module) -> nn.Module:
    """The modules as they were before ``fully_shard``, which forbids copies, with the same sharded parameters."""
    reshard(model)
    return _plain(model, {})


def reshard(model: nn.Module) -> None:
    """Give up what a forward pass has gathered, so that the parameters are the sharded ones."""
    for module in model.modules():
        if _sharding(module):
            module.reshard()  # type: ignore[operator]


def _sharding(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes long, and who uses it has done so
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _plain(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    kind = type(module)
    # fully_shard makes a class of (FSDPModule, the module's own)
    other: nn.Module = object.__new__(kind.__mro__[2] if _sharding(module) else kind)
    made[id(module)] = other
    kept = {name: value for name, value in module.__dict__.items() if not name.startswith("__composable_api")}
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
