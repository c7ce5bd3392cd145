"""Recognizes quantized weights: which tensors are codes and scales of a weight.

Pure. The document of scales describes elements that have the weight's shape. A Hugging Face
configuration's `quantization_config` describes packed ones, too: of GPTQ (AutoGPTQ, GPTQModel), AWQ
(AutoAWQ, version gemm), compressed-tensors, and float8 with scales of blocks, rows or all. A weight
is recognized only if the shapes of its tensors agree; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import CONFIG, SCALES
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX
from keepstep.checkpoint.format.layout.source import TensorSpec

_Tensors = Mapping[str, TensorSpec]

WORD_BITS = 32
_WORD = "int32"
_FLOAT8 = "float8_"
# Element k of a word of AWQ is at this place among its eight.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Data types of plain numbers, unless scales are known to belong to them."""

# Endings that libraries append to a weight's name for codes and scales.
_ENDINGS = (
    "_blocks",
    "_packed",
    "_scale",
    "_scale_inv",
    "_scales",
    ".absmax",
    ".quant_map",
)
# Names next to `weight` in a module.
_NAMES_NEXT_TO_WEIGHT = ("qweight", "SCB", "B", "codes", "Qidxs", "W_q")
_SCALE_DTYPES = (*FLOATS, "float8_e8m0fnu")

OF_ACTIVATIONS = (
    "activation_scale",
    "input_global_scale",
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)
"""Last parts of names of tensors that quantize activations; an unquantized module has none."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Elements of the weight's shape; each block of this shape has a scale."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Elements of a few bits, several in each 32-bit word; each group of inputs has a scale.

    Attributes:
        bits: bits of an element.
        packed_axis: axis of the codes along which elements share words.
        input_axis: axis of codes and scales for the weight's second dimension: 1, or 0 where the
            codes are those of its transpose. Zero points share words along the other axis.
        places: the place in a word of each of its elements.
        group_size: inputs that have a scale, where no tensor says it.
        added_to_zeros: what is added to each word of zero points, modulo 2**32. GPTQ stores them
            less by one; GPTQModel subtracts it from whole words, so that zeros borrow.
    """

    bits: int
    packed_axis: int
    input_axis: int
    places: tuple[int, ...]
    group_size: int
    added_to_zeros: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight that a checkpoint holds as codes and scales.

    An element is (code - zero point) x scale.

    Attributes:
        key: the weight's key; also that of the codes if these are not packed.
        shape: the weight's shape.
        codes: key of the codes.
        scale: key of the scales.
        form: the relation of codes and scales.
        zero_point: key of the zero points; None for half of the range of packed codes, else zero.
        groups: key of the group of each input; None if groups follow each other.
        stored_shape: key of the tensor that has the weight's shape; None if none has.
        of_activations: keys of the tensors that quantize the module's activations.
    """

    key: str
    shape: tuple[int, ...]
    codes: str
    scale: str
    form: Blocks | Packing
    zero_point: str | None = None
    groups: str | None = None
    stored_shape: str | None = None
    of_activations: tuple[str, ...] = field(default=(), compare=False)

    @property
    def parts(self) -> tuple[str, ...]:
        """The keys of all tensors that hold the weight."""
        keys = (self.codes, self.scale, self.zero_point, self.groups, self.stored_shape)
        return tuple(key for key in keys if key is not None)


def quantization_config(documents: Mapping[str, Json]) -> Mapping[str, Json] | None:
    """Return the `quantization_config` of a model's configuration; None without one."""
    config = documents.get(CONFIG)
    if not isinstance(config, Mapping):
        return None
    text_config = config.get("text_config")
    for holder in (config, text_config if isinstance(text_config, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if isinstance(content := holder.get(name), Mapping):
                return content
    return None


def method_name(quantization: Mapping[str, Json]) -> str:
    """Return the method of a `quantization_config`, in words."""
    details = (quantization.get(name) for name in ("quant_method", "format", "checkpoint_format"))
    return ", ".join(str(detail)[:40] for detail in details if detail) or "of no known name"


def is_quantized(documents: Mapping[str, Json]) -> bool:
    """Return whether documents describe quantized weights."""
    return bool(documents.get(SCALES)) or quantization_config(documents) is not None


def quantized_weights(
    documents: Mapping[str, Json], tensors: _Tensors
) -> dict[str, QuantizedWeight]:
    """Return the quantized weights that the documents describe, by key.

    Args:
        documents: those of a checkpoint, that on scales checked against its tensors.
        tensors: the checkpoint's.
    """
    weights = {weight.key: weight for weight in _configured(documents, tensors)}
    for name, entry in (documents.get(SCALES) or {}).items():
        key = name if name in tensors else f"{MODEL_PREFIX}{name}"
        weights[key] = QuantizedWeight(
            key=key,
            shape=tensors[key].shape,
            codes=key,
            scale=entry["scale"],
            form=Blocks(tuple(entry["block_shape"])),
            zero_point=entry.get("zero_point"),
            of_activations=_of_activations(key, tensors),
        )
    return weights


def keys_of_quantized(documents: Mapping[str, Json], tensors: _Tensors) -> frozenset[str]:
    """Return the keys of tensors that hold quantized weights, which are never rounded.

    For a method that is not known here, these are all tensors of modules with more than a weight
    and a bias. Without a configuration they are recognized by name.
    """
    weights = quantized_weights(documents, tensors) if is_quantized(documents) else {}
    known = {key for weight in weights.values() for key in (*weight.parts, *weight.of_activations)}
    own_names: dict[str, set[str]] = {}
    for key in tensors:
        if key.startswith(MODEL_PREFIX):
            own_names.setdefault(key.rpartition(".")[0], set()).add(key)
    if quantization_config(documents) is None:
        return frozenset(known).union(*(
            names
            for names in own_names.values()
            if names.isdisjoint(known) and any(_is_named_so(key, tensors) for key in names)
        ))  # fmt: skip
    plain = ("weight", "bias")
    return frozenset(known).union(*(
        names
        for names in own_names.values()
        if names.isdisjoint(known) and any(key.rpartition(".")[2] not in plain for key in names)
    ))  # fmt: skip


def is_of_quantized(key: str, other: str) -> bool:
    """Return whether a name next to a tensor's is one that libraries give to codes or scales."""
    if other.startswith(key):
        return other.removeprefix(key) in _ENDINGS
    return other.rpartition(".")[2] in _NAMES_NEXT_TO_WEIGHT


def _is_named_so(key: str, tensors: _Tensors) -> bool:
    """Return whether a tensor quantizes another one that has codes, or its module's weight."""
    module, dot, _ = key.rpartition(".")
    weight = f"{module}{dot}weight"
    if weight not in tensors and is_of_quantized(weight, key):
        return True
    endings = (ending for ending in _ENDINGS if key.endswith(ending))
    originals = [tensors[name] for e in endings if (name := key.removesuffix(e)) in tensors]
    return any(spec.dtype not in FLOATS for spec in originals)


def scales_of_blocks(config: Mapping[str, Json], tensors: _Tensors) -> dict[str, Json]:
    """Return the document of scales that a model's configuration implies."""
    text_config = config.get("text_config")
    holders = (config, text_config if isinstance(text_config, Mapping) else {})
    named = (holder.get(name) for holder in holders for name in ("dtype", "torch_dtype"))
    dtype = next((name for name in named if isinstance(name, str)), None)
    scales: dict[str, Json] = {}
    for weight in _configured({CONFIG: config}, tensors):
        if isinstance(weight.form, Blocks):
            scales[weight.key] = {
                "scale": weight.scale,
                "block_shape": list(weight.form.shape),
                "dtype": dtype if dtype in FLOATS else "bfloat16",
            }
            if weight.zero_point is not None:
                scales[weight.key]["zero_point"] = weight.zero_point
    return scales


def _configured(documents: Mapping[str, Json], tensors: _Tensors) -> Iterator[QuantizedWeight]:
    quantization = quantization_config(documents)
    if quantization is None:
        return
    find = {
        "fp8": _float8,
        "fbgemm_fp8": _float8,
        "compressed-tensors": _compressed,
        "gptq": _gptq,
        "awq": _awq,
    }.get(str(quantization.get("quant_method")))
    if find is not None:
        yield from find(quantization, tensors)


def _float8(quantization: Mapping[str, Json], tensors: _Tensors) -> Iterator[QuantizedWeight]:
    """Yield weights in float8: of blocks, as DeepSeek-V3's, of rows, or with one scale."""
    block = _sizes(quantization.get("weight_block_size"))
    for key, suffix in _ending(tensors, ("_scale_inv", "_scale")):
        codes = tensors.get(key)
        if codes is None or not codes.dtype.startswith(_FLOAT8):
            continue
        scale = f"{key}{suffix}"
        form = _blocks(codes.shape, tensors[scale], block)
        if form is not None:
            yield QuantizedWeight(
                key=key,
                shape=codes.shape,
                codes=key,
                scale=scale,
                form=form,
                of_activations=_of_activations(key, tensors),
            )


def _blocks(
    shape: tuple[int, ...], scale: TensorSpec, block: tuple[int, ...] | None
) -> Blocks | None:
    """Return the blocks of a tensor with these scales; None if the shapes do not agree."""
    if scale.dtype not in _SCALE_DTYPES or not shape or 0 in shape:
        return None
    if all(extent == 1 for extent in scale.shape):
        return Blocks(shape)
    if len(scale.shape) != len(shape):
        return None
    if block is not None and len(block) <= len(shape):
        whole = (*(1 for _ in shape[len(block) :]), *block)
        if scale.shape == tuple(map(ceil_div, shape, whole)):
            return Blocks(whole)
    if any(extent % count for extent, count in zip(shape, scale.shape, strict=True)):
        return None
    return Blocks(tuple(n // count for n, count in zip(shape, scale.shape, strict=True)))


def _compressed(quantization: Mapping[str, Json], tensors: _Tensors) -> Iterator[QuantizedWeight]:
    """Yield weights of compressed-tensors: int8 or float8, or integers of 1, 2, 4 or 8 bits."""
    sparsity = quantization.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        return
    groups = quantization.get("config_groups")
    schemes = [
        (str(group.get("format") or quantization.get("format")), group["weights"])
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    for key, suffix in _ending(tensors, ("_scale",)):
        candidates = [
            weight
            for form, arguments in schemes
            if (weight := _of_scheme(form, arguments, key, f"{key}{suffix}", tensors)) is not None
        ]
        if candidates and all(weight == candidates[0] for weight in candidates):
            yield candidates[0]


def _of_scheme(
    form: str, arguments: Mapping[str, Json], key: str, scale: str, tensors: _Tensors
) -> QuantizedWeight | None:
    """Return a weight if it is quantized by a scheme of compressed-tensors."""
    bits, group_size = arguments.get("num_bits"), arguments.get("group_size")
    zero_point = f"{key}_zero_point" if f"{key}_zero_point" in tensors else None
    if not arguments.get("symmetric", True) and zero_point is None:
        return None
    if form in ("int-quantized", "float-quantized", "naive-quantized"):
        codes = tensors.get(key)
        if codes is None or not (codes.dtype == "int8" or codes.dtype.startswith(_FLOAT8)):
            return None
        block = {
            "group": (1, group_size) if isinstance(group_size, int) else None,
            "block": _sizes(arguments.get("block_structure")),
        }.get(str(arguments.get("strategy")))
        blocks = _blocks(codes.shape, tensors[scale], block)
        if blocks is None or f"{key}_g_idx" in tensors:
            return None
        if zero_point is not None and tensors[zero_point].shape != tensors[scale].shape:
            return None
        return QuantizedWeight(
            key=key,
            shape=codes.shape,
            codes=key,
            scale=scale,
            form=blocks,
            zero_point=zero_point,
            of_activations=_of_activations(key, tensors),
        )
    codes = tensors.get(f"{key}_packed")
    if (
        form != "pack-quantized"
        or codes is None
        or codes.dtype != _WORD
        or len(codes.shape) != 2
        # Elements of other sizes lie across words, since a release of the library.
        or bits not in (1, 2, 4, 8)
        or arguments.get("type", "int") != "int"
    ):
        return None
    per_word = WORD_BITS // bits
    outputs, inputs = codes.shape[0], codes.shape[1] * per_word
    size = inputs
    if arguments.get("strategy") == "group" and isinstance(group_size, int):
        size = group_size
    zeros = None if zero_point is None else tensors[zero_point]
    if not _are_grouped(tensors[scale], (outputs, inputs), size, input_axis=1) or not (
        zeros is None
        or zeros == TensorSpec(_WORD, (ceil_div(outputs, per_word), tensors[scale].shape[1]))
    ):
        return None
    return QuantizedWeight(
        key=key,
        shape=(outputs, inputs),
        codes=f"{key}_packed",
        scale=scale,
        form=Packing(
            bits=bits,
            packed_axis=1,
            input_axis=1,
            places=tuple(range(per_word)),
            group_size=size,
        ),
        zero_point=zero_point,
        groups=f"{key}_g_idx" if f"{key}_g_idx" in tensors else None,
        stored_shape=f"{key}_shape" if f"{key}_shape" in tensors else None,
        of_activations=_of_activations(key, tensors),
    )


def _gptq(quantization: Mapping[str, Json], tensors: _Tensors) -> Iterator[QuantizedWeight]:
    """Yield weights of GPTQ, whose zero points are less by one, except in `gptq_v2`."""
    stored = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    if stored not in ("gptq", "gptq_v2"):
        return
    for module in _modules_with(tensors, ("qweight", "qzeros", "scales")):
        codes, zeros, scale = _three(module, tensors)
        groups = f"{module}g_idx" if f"{module}g_idx" in tensors else None
        per_word = scale.shape[1] // zeros.shape[1] if zeros.shape[1] else 0
        if per_word not in (4, 8, 16) or scale.shape[1] % per_word:
            continue
        inputs, outputs = codes.shape[0] * per_word, scale.shape[1]
        bits = WORD_BITS // per_word
        size = _group_size(quantization, inputs)
        if (
            codes.shape[1] != outputs
            or zeros.shape[0] != scale.shape[0]
            or (groups is not None and tensors[groups] != TensorSpec(_WORD, (inputs,)))
            # Some modules may have their own bits and groups.
            or (not quantization.get("dynamic") and bits != quantization.get("bits"))
            or (groups is None and not _are_grouped(scale, (outputs, inputs), size, input_axis=0))
        ):
            continue
        yield _of_module(
            module,
            (outputs, inputs),
            Packing(
                bits=bits,
                packed_axis=0,
                input_axis=0,
                places=tuple(range(per_word)),
                group_size=size,
                added_to_zeros=0 if stored == "gptq_v2" else _ones(bits),
            ),
            groups,
            tensors,
        )


def _awq(quantization: Mapping[str, Json], tensors: _Tensors) -> Iterator[QuantizedWeight]:
    """Yield weights of AWQ in the order of its version gemm, of 4 bits."""
    names = ("version", "checkpoint_format", "format")
    if any(str(quantization.get(name) or "gemm").lower() != "gemm" for name in names):
        return
    bits = quantization.get("bits", quantization.get("w_bit"))
    if bits != 4:
        return
    for module in _modules_with(tensors, ("qweight", "qzeros", "scales")):
        codes, zeros, scale = _three(module, tensors)
        outputs, inputs = codes.shape[1] * 8, codes.shape[0]
        size = _group_size(quantization, inputs)
        if (
            scale.shape[1] == outputs
            and zeros.shape == (scale.shape[0], codes.shape[1])
            and _are_grouped(scale, (outputs, inputs), size, input_axis=0)
        ):
            yield _of_module(
                module,
                (outputs, inputs),
                Packing(bits=4, packed_axis=1, input_axis=0, places=_AWQ_PLACES, group_size=size),
                None,
                tensors,
            )


def _of_module(
    module: str,
    shape: tuple[int, int],
    form: Packing,
    groups: str | None,
    tensors: _Tensors,
) -> QuantizedWeight:
    return QuantizedWeight(
        key=f"{module}weight",
        shape=shape,
        codes=f"{module}qweight",
        scale=f"{module}scales",
        form=form,
        zero_point=f"{module}qzeros",
        groups=groups,
        of_activations=_of_activations(f"{module}weight", tensors),
    )


def _are_grouped(scale: TensorSpec, shape: tuple[int, int], size: Json, *, input_axis: int) -> bool:
    """Return whether scales belong to groups of inputs, for each output."""
    outputs, inputs = shape
    if type(size) is not int or size < 1 or scale.dtype not in _SCALE_DTYPES:
        return False
    grid = (outputs, ceil_div(inputs, size))
    return scale.shape == (grid if input_axis == 1 else grid[::-1])


def _ones(bits: int) -> int:
    """Return the word whose elements are all 1."""
    return sum(1 << place for place in range(0, WORD_BITS, bits))


def _group_size(quantization: Mapping[str, Json], inputs: int) -> int:
    size = quantization.get("group_size", quantization.get("q_group_size"))
    return size if type(size) is int and size > 0 else inputs


def _modules_with(tensors: _Tensors, leaves: tuple[str, ...]) -> Iterator[str]:
    """Yield the prefixes of modules that have these matrices, the first two of words."""
    for key, _ in _ending(tensors, (leaves[0],)):
        specs = [tensors.get(f"{key}{leaf}") for leaf in leaves]
        if (
            key.endswith(".")
            and all(spec is not None and len(spec.shape) == 2 for spec in specs)
            and all(spec is not None and spec.dtype == _WORD for spec in specs[:2])
        ):
            yield key


def _three(module: str, tensors: _Tensors) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    return tensors[f"{module}qweight"], tensors[f"{module}qzeros"], tensors[f"{module}scales"]


def _ending(tensors: _Tensors, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the model's keys with one of these endings, as the stem and the ending."""
    for key in tensors:
        for suffix in suffixes:
            if key.startswith(MODEL_PREFIX) and key.endswith(suffix):
                yield key.removesuffix(suffix), suffix


def _of_activations(key: str, tensors: _Tensors) -> tuple[str, ...]:
    module = key.rpartition(".")[0]
    names = (f"{module}.{leaf}" for leaf in OF_ACTIVATIONS)
    return tuple(name for name in names if name in tensors)


def _sizes(value: Json) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or not all(type(n) is int and n > 0 for n in value):
        return None
    return tuple(value)
