"""The legend of axis letters, their placement on a mesh, and the frozen pytree dataclass.

One letter means one axis everywhere: in array annotations, einsum strings, unpacked shapes and
sharding rules.

    B  batch row                          E  routed experts
    T  tokens in this call (queries)      A  active experts per token
    S  cache slots (keys)                 F  feed-forward width
    L  layers                             V  target vocabulary
    D  model width                        W  draft vocabulary
    N  attention heads                    K  draft tokens in a cycle
    U  head width not rotated (qk_nope)   M  nodes of a draft tree
    R  head width rotated (qk_rope)       Z  tapped layers
    H  value head width                   G  int4 groups along the contracted axis
    Q  query latent rank (q_lora)         C  key-value latent rank (kv_lora)
    P  key-value heads (Llama drafter)

Two letters written together ("UR", "CR") are those axes concatenated, and are never sharded. The
slots of all batch rows ("BS" in annotations) are placed as "S": where that is cut, each device
holds a share of every row's slots (`kernels_pallas.slots`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

import jax
from jax.sharding import PartitionSpec

from kernels_pallas.slots import ALL, Share

T_ = TypeVar("T_")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree_dataclass(cls: type[T_]) -> type[T_]:
    """A frozen keyword-only dataclass whose fields are pytree children.

    Rebuilding goes around `__init__`: JAX unflattens with placeholder leaves, which a checked
    constructor would refuse (`jax.tree_util.register_dataclass` calls the constructor). Fields
    declared with `static_field()` are part of the tree's structure instead.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    static = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(obj: Any):
        keys = [(jax.tree_util.GetAttrKey(name), getattr(obj, name)) for name in children]
        return keys, tuple(getattr(obj, name) for name in static)

    def unflatten(aux: tuple, leaves: Any) -> Any:
        obj = object.__new__(cls)
        for name, value in (*zip(static, aux, strict=True), *zip(children, leaves, strict=True)):
            object.__setattr__(obj, name, value)
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def static_field(**kwargs: Any) -> Any:
    """A field that belongs to the structure of the pytree (hashable, a change recompiles)."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def replace(obj: T_, **changes: Any) -> T_:
    """`dataclasses.replace` for pytree dataclasses whose leaves may be placeholders."""
    new = object.__new__(type(obj))
    for f in dataclasses.fields(obj):  # type: ignore[arg-type]
        object.__setattr__(new, f.name, changes.pop(f.name, getattr(obj, f.name)))
    if changes:
        raise TypeError(f"{type(obj).__name__} has no field {sorted(changes)}")
    return new


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which mesh axes each axis letter is cut over; the one table that places every array.

    An axis string ("E D F") names an array's axes by letter. Mesh axes already taken by an earlier
    letter of the same string are left out, so that "F" may be cut over expert and tensor devices in
    a dense layer, and over tensor devices alone inside experts that are themselves cut over "E".
    """

    table: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def of(cls, table: Mapping[str, tuple[str, ...]]) -> "Rules":
        """Rules from a mapping letter -> mesh axes; letters not named are whole everywhere."""
        return cls(tuple((letter, tuple(axes)) for letter, axes in table.items()))

    def mesh_axes(self, letter: str) -> tuple[str, ...]:
        """The mesh axes a letter is cut over, before others of its string take theirs."""
        return dict(self.table).get(letter, ())

    def pspec(self, letters: str) -> PartitionSpec:
        """The placement of an array with these axes."""
        taken: set[str] = set()
        entries: list[tuple[str, ...] | None] = []
        for letter in letters.split():
            axes = tuple(axis for axis in self.mesh_axes(letter) if axis not in taken)
            taken.update(axes)
            entries.append(axes or None)
        return PartitionSpec(*entries)

    def sum(self, x: jax.Array, letters: str) -> jax.Array:
        """Completes a contraction over these letters: the sum over the devices they are cut over.

        Inside `jax.shard_map`; the identity where none of the letters is cut.
        """
        axes = tuple(dict.fromkeys(a for letter in letters.split() for a in self.mesh_axes(letter)))
        return jax.lax.psum(x, axes) if axes else x

    def shard_index(self, letter: str) -> jax.Array | int:
        """This device's place along a letter: its shard starts at index times the shard's size."""
        axes = self.mesh_axes(letter)
        return jax.lax.axis_index(axes) if axes else 0

    def num_shards(self, letter: str) -> int:
        """Over how many devices a letter is cut; inside `jax.shard_map`."""
        axes = self.mesh_axes(letter)
        return jax.lax.axis_size(axes) if axes else 1

    def share(self) -> Share:
        """Which cache slots this device holds; inside `jax.shard_map`."""
        if not self.mesh_axes("S"):
            return ALL
        return Share(self.shard_index("S"), self.num_shards("S"))


WHOLE = Rules()
"""Nothing is cut: one device, or a computation outside `jax.shard_map`."""
