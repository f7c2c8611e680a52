"""Arrays of any library: their namespace, floating-point type and order in memory, and the rules for inputs.

Everything above this module is written against the array namespace ``xp`` of the Python array API standard.
Four things the standard lacks are bridged here and nowhere else: views of bit patterns (`bit_pattern`),
strides (`is_column_major`), the tests for shared memory (`overlap`, `overlaps_itself`), and a conversion to float64
that is exact in every library (`in_float64`).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
Namespace = Any


@dataclass(frozen=True)
class FloatType:
    """A floating-point format, described by what rounding-error analysis needs of it.

    Attributes
    ----------
    name : str
        Its name in NumPy's spelling.
    bits : int
        Width in memory.
    precision : int
        Significand bits, the hidden one counted: the unit roundoff is ``2**-precision``.
    min_exponent : int
        Exponent of the smallest normal number.
    max_exponent : int
        ``2**max_exponent`` is the first power of two that overflows.
    """

    name: str
    bits: int
    precision: int
    min_exponent: int
    max_exponent: int

    @functools.cached_property
    def unit_roundoff(self) -> float:
        return math.ldexp(1.0, -self.precision)

    @functools.cached_property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @functools.cached_property
    def smallest_subnormal(self) -> float:
        if self.bits == 64:  # which no arithmetic makes where the processor flushes subnormal numbers
            return float(np.array(1, np.uint64).view(np.float64))
        return math.ldexp(1.0, self.min_exponent - self.precision + 1)

    @functools.cached_property
    def largest(self) -> float:
        return math.ldexp(2.0 - math.ldexp(1.0, 1 - self.precision), self.max_exponent - 1)


FLOATS: dict[str, FloatType] = {
    t.name: t
    for t in (
        FloatType("float64", 64, 53, -1022, 1024),
        FloatType("float32", 32, 24, -126, 128),
        FloatType("float16", 16, 11, -14, 16),
        FloatType("bfloat16", 16, 8, -126, 128),
    )
}


def _name_of(dtype: Any) -> str:
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


_numpy_name: Callable[[Any], str] = functools.cache(_name_of)  # NumPy makes the name anew each time it is asked


def dtype_name(dtype: Any) -> str:
    """NumPy's spelling of a dtype of any array library (``'float32'``)."""
    return _numpy_name(dtype) if isinstance(dtype, np.dtype) else _name_of(dtype)


def type_name(dtype: Any) -> str:
    """The name of what a caller gives as a dtype: all that NumPy takes, and other libraries' dtypes.

    Examples
    --------
    >>> type_name("f8"), type_name(np.float32), type_name("bfloat16")
    ('float64', 'float32', 'bfloat16')
    """
    if isinstance(dtype, str) and dtype in FLOATS:
        return dtype  # NumPy knows "bfloat16" only where ml_dtypes has been imported
    try:
        return dtype_name(np.dtype(dtype))
    except (TypeError, ValueError, SyntaxError):  # NumPy's, by what the text looks like
        return dtype_name(dtype)


def float_type(x: Array) -> FloatType:
    """The `FloatType` of an array that `as_operand` has accepted."""
    dtype = x.dtype
    return FLOATS[_numpy_name(dtype) if isinstance(dtype, np.dtype) else _name_of(dtype)]


def is_numpy(x: Array) -> bool:
    return isinstance(x, np.ndarray)


def _library_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


_library: Callable[[type], str] = functools.cache(_library_of)


def is_cupy(x: Array) -> bool:
    return _library(type(x)) == "cupy"


def served_elsewhere(*arrays: Any) -> Any:
    """The module that has the operations for these, where they are collections of an engine; None for arrays."""
    for x in arrays:
        if _library(type(x)) == "dask":
            return importlib.import_module("abft_tsm2.interop.dask")
    return None


def is_writable(x: Array) -> bool:
    """Whether the elements of `x` may be changed; only NumPy has arrays that say no."""
    return bool(getattr(getattr(x, "flags", None), "writeable", True))


@functools.cache
def _compatible(library: str) -> Namespace:
    if library == "cupy":
        return importlib.import_module("array_api_compat.cupy")
    return importlib.import_module("array_api_compat.numpy")


def _find_namespace(kind: type) -> Namespace:
    """array_api_compat's namespace of an array type, or None for a type that brings its own."""
    if issubclass(kind, np.ndarray):
        return _compatible("numpy")
    return _compatible("cupy") if _library(kind) == "cupy" else None


_namespace_of: Callable[[type], Namespace] = functools.cache(_find_namespace)


def namespace(*arrays: Array) -> Namespace:
    """The one array namespace all `arrays` belong to.

    Raises
    ------
    TypeError
        If the arrays belong to different libraries, with the advice to move one of them.
    """
    if len(arrays) == 1 or (len(arrays) == 2 and type(arrays[0]) is type(arrays[1])):
        return _namespace_of(type(arrays[0])) or arrays[0].__array_namespace__()
    found = {}
    for x in arrays:
        xp = _namespace_of(type(x)) or x.__array_namespace__()
        found[xp.__name__.removeprefix("array_api_compat.")] = xp
    if len(found) > 1:
        raise TypeError(
            f"arrays of {' and '.join(sorted(found))} in one call: move them to one library first "
            "(cupy.asarray(x) takes a NumPy array to the GPU, cupy.asnumpy(x) brings one back)"
        )
    return next(iter(found.values()))


_ADVICE = {
    "i": "integers are not checked here: convert with .astype('float64') (exact below 2**53)",
    "u": "integers are not checked here: convert with .astype('float64') (exact below 2**53)",
    "b": "booleans are not checked here: convert with .astype('float32')",
    "c": "complex is not supported: multiply the real and imaginary parts as four real products",
}


def _advice_on_jax(x: Any, name: str) -> str:
    if any(base.__name__ == "Tracer" for base in type(x).__mro__):
        return (
            "JAX traces this function (jit, grad, vmap), and there are no numbers yet that could be checked; "
            "call it outside of what is traced, or through jax.pure_callback"
        )
    return f"nothing can be written into a JAX array, as repairs do; pass numpy.asarray({name})"


def _advice_on_tensor(x: Any, name: str) -> str:
    device = str(getattr(x, "device", "cpu")).partition(":")[0]
    tensor = f"{name}.detach()" if (gradient := getattr(x, "requires_grad", False)) else name
    tensor += "" if str(getattr(x, "layout", "torch.strided")) == "torch.strided" else ".to_dense()"
    if device == "cuda":
        call = f"cupy.from_dlpack({tensor})"
    else:
        wide = ".float()" if dtype_name(getattr(x, "dtype", None)) == "bfloat16" else ""
        call = f"{tensor}{'' if device == 'cpu' else '.cpu()'}{wide}.numpy()"
    return f"{'it needs a gradient, which ends here; ' if gradient else ''}pass {call}"


_Advice = Callable[[Any, str], str]
_REFUSED: dict[str, _Advice] = {
    "jax": _advice_on_jax,
    "jaxlib": _advice_on_jax,
    "torch": _advice_on_tensor,
    "tensorflow": lambda x, name: f"pass {name}.numpy()",
    "pandas": lambda x, name: f"pass {name}.to_numpy(dtype='float64')",
    "sparse": lambda x, name: f"pass {name}.todense()",
    "scipy": lambda x, name: f"pass {name}.toarray()" if hasattr(x, "toarray") else "pass a NumPy or CuPy array",
}
_REFUSED["cupyx"] = _REFUSED["scipy"]
"""Of libraries whose arrays are not taken: what to do."""


def _find_refused_library(kind: type) -> str | None:
    """The one of `_REFUSED` that a type, or one that it is derived from, is of."""
    return next((library for base in kind.__mro__ if (library := _library_of(base)) in _REFUSED), None)


_refused_library: Callable[[type], str | None] = functools.cache(_find_refused_library)


def refuse_other_containers(x: Any, name: str) -> None:
    """TypeError, with what to do, for arrays of libraries that are not taken, masked arrays and `numpy.matrix`."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array and its mask would be ignored: pass {name}.filled(value)")
    if isinstance(x, np.matrix):  # of which slices, sums and products have other shapes than those of an array
        raise TypeError(f"{name} is a numpy.matrix, whose operations are not those of arrays: use np.asarray({name})")
    if (library := _refused_library(type(x))) is not None:
        raise TypeError(f"{name} is a {_shown_type(x)}: {_REFUSED[library](x, name)}")


def _shown_type(x: Any) -> str:
    """Library and name of a type, without the modules in between."""
    library, name = _library(type(x)), type(x).__name__
    return name if library == "builtins" else f"{library}.{name}"


def in_numpy(x: Any, name: str) -> np.ndarray[Any, Any]:
    """What NumPy makes of lists, scalars and the like; TypeError where that is nothing."""
    try:
        return np.asarray(x)
    except ValueError as error:
        raise TypeError(f"{name} is not a rectangular array of numbers: {error}") from error
    except (TypeError, RuntimeError) as error:  # of what refuses to be converted
        raise TypeError(f"NumPy makes no array of {name}, whose type is {_shown_type(x)}: {error}") from error


def as_operand(x: Any, name: str) -> Array:
    """Turn `x` into an array this package works on, without copying one that already is.

    Lists and NumPy subclasses become plain ``ndarray``, but for `numpy.matrix`; integers, booleans and complex are
    refused, because a silent conversion would hide a full-size copy.

    Raises
    ------
    TypeError
        For a dtype or a container that cannot be protected; the message says what to do instead.
    """
    if type(x) is np.ndarray and _numpy_name(x.dtype) in FLOATS:
        return x
    if not is_cupy(x):
        refuse_other_containers(x, name)
        if isinstance(x, np.ndarray | np.generic) or not hasattr(x, "__array_namespace__"):
            x = in_numpy(x, name)
        elif not hasattr(x, "__dlpack__"):
            raise TypeError(f"{name} is a {_shown_type(x)}, without __dlpack__: pass a NumPy or CuPy array")
    dtype = dtype_name(x.dtype)
    if dtype in FLOATS:
        return x
    kind = getattr(x.dtype, "kind", dtype[0])
    advice = _ADVICE.get(kind, f"supported are {', '.join(FLOATS)}")
    raise TypeError(f"{name} has dtype {dtype}: {advice}")


def as_output(out: Any) -> Array:
    """`out` as an array to write a result into, each element in a place of its own.

    Raises
    ------
    TypeError
        For what is no array itself, as what is written into a copy of it would be lost.
    ValueError
        If it is read-only, or overlaps itself.
    """
    if _refused_library(type(out)) is not None:  # what as_operand advises makes a copy
        raise TypeError(f"out is a {_shown_type(out)}: it must be a NumPy or CuPy array, to be written into")
    x = as_operand(out, "out")
    if not (x is out or isinstance(out, np.ndarray)):
        raise TypeError(f"out is a {type(out).__name__}: it must be an array, to be written into")
    if not is_writable(x):
        raise ValueError("out is read-only: pass an array that may be written")
    if overlaps_itself(x):
        raise ValueError(
            f"elements of out share memory: its strides are {tuple(getattr(x, 'strides', ()))} bytes, its shape "
            f"{tuple(x.shape)}; pass an array in which each element has its own, such as out.copy()"
        )
    return x


def real_number(value: Any, name: str) -> float:
    """`value` as a float; TypeError for what is no real number, ValueError for what is beyond all floats."""
    if type(value) is float:
        return value
    dtype = getattr(value, "dtype", None)
    kind = "b" if dtype is not None and dtype_name(dtype) == "bool" else getattr(dtype, "kind", "f")
    try:
        # float() reads texts, takes True for 1, and drops imaginary parts.
        if isinstance(value, bool | str | bytes | bytearray) or kind in "bcSUmM" or getattr(value, "ndim", 0) != 0:
            raise TypeError("not a real number")
        return float(value)
    except (TypeError, ValueError) as error:
        text = repr(value)
        shown = text if len(text) < 80 and "\n" not in text else f"a {_shown_type(value)}"
        raise TypeError(f"{name} is {shown}: expected a real number") from error
    except OverflowError as error:
        raise ValueError(
            f"{name} is beyond {FLOATS['float64'].largest:.3g}, the largest float64: scale an operand instead"
        ) from error


def in_native_order(x: Array) -> Array:
    """x, or a copy of it in this machine's byte order where it is in the other one."""
    return x if getattr(x.dtype, "isnative", True) else x.astype(x.dtype.newbyteorder("="))


def to_host(x: Array) -> np.ndarray[Any, Any]:
    """`x` as a NumPy array; on a GPU this copies and synchronises with the host."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "get"):
        return np.asarray(x.get())
    return np.from_dlpack(x)


def same_bits(x: Array, y: Array) -> bool:
    """Whether two arrays, or None and None, agree bit for bit, NaN included; on a GPU this copies and synchronises with
    the host."""
    if x is y is None:
        return True
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x.tobytes() == y.tobytes()
    return to_host(x).tobytes() == to_host(y).tobytes()


def from_host(x: np.ndarray[Any, Any], like: Array) -> Array:
    """`x` as an array of the library and on the device of `like`."""
    if isinstance(like, np.ndarray):
        return x
    xp = namespace(like)
    return xp.asarray(x, device=like.device) if not hasattr(like, "get") else xp.asarray(x)


def laid_out(X: Array, memory: Array) -> Array:
    """NumPy's contiguous memory as an array like X, a matrix or a stack: each matrix lies as a copy of it alone would,
    the axes of a stack outside of it."""
    shape = X.shape
    if shape[-2] > 1 and abs(X.strides[-2]) < abs(X.strides[-1]):
        return memory.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
    return memory.reshape(shape)


def converted(X: Array, dtype: Any) -> Array:
    """A NumPy matrix or stack in another type, each matrix as if it were alone: products with it add in the same order
    then. (NumPy's copy of what is broadcast over the axes of a stack has these inside of the matrices.)"""
    if X.ndim == 2:
        return X.astype(dtype)
    copy = laid_out(X, np.empty(X.size, dtype))
    copy[...] = X
    return copy


def is_column_major(x: Array) -> bool:
    """Whether the first axis of the matrix `x` is the one that runs fastest in memory.

    A matrix of one row or one column is one line, whatever its strides.
    """
    if 1 in x.shape:
        return bool(x.shape[1] == 1)
    strides = getattr(x, "strides", None)  # the standard has no strides: then row-major is assumed
    return strides is not None and abs(strides[-2]) < abs(strides[-1])


_UNSIGNED = {2: "uint16", 4: "uint32", 8: "uint64"}


def bit_pattern(x: Array) -> Array:
    """The bit patterns of a C-contiguous array as unsigned integers of the same width: a view, no copy."""
    if not hasattr(x, "view"):  # the standard has no view: exchange the buffer with NumPy instead
        x = np.from_dlpack(x)
    return x.view(_UNSIGNED[x.dtype.itemsize])


def in_float64(x: Array, *, copy: bool = False) -> Array:
    """x in float64, subnormal numbers included; x itself where it is, unless a copy is asked for. CuPy's own conversion
    of float32 flushes these to zero."""
    xp = namespace(x)
    if x.dtype == xp.float32 and is_cupy(x):
        import cupy

        return _converted(cupy)(x, cupy.empty_like(x, dtype=cupy.float64))
    return xp.astype(x, xp.float64, copy=copy)


@functools.lru_cache(maxsize=1)
def _converted(cupy: Any) -> Any:
    text = 'asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x))'
    return cupy.ElementwiseKernel("float32 x", "float64 y", text, "abft_tsm2_in_float64")


def overlap(x: Array, y: Array) -> bool:
    """Whether writing to `x` may change `y`."""
    if not hasattr(x, "get"):
        try:
            x, y = (z if isinstance(z, np.ndarray) else np.from_dlpack(z) for z in (x, y))
            return bool(np.shares_memory(x, y, max_work=100_000))  # type: ignore[arg-type]  # the stubs know 0 and -1 only
        except np.exceptions.TooHardError:
            return True
    import cupy

    return bool(cupy.may_share_memory(x, y))


def overlaps_itself(x: Array) -> bool:
    """Whether elements of `x` lie on the same bytes, as those of `broadcast_to` and of `as_strided` may."""
    if not hasattr(x, "strides"):
        x = np.from_dlpack(x)
    if 0 in x.shape:
        return False
    # Elements are apart where each stride reaches beyond all that the smaller ones span, as in slices and transposes.
    span = x.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(x.strides, x.shape, strict=True)):
        if size > 1 and stride < span:
            break
        span += stride * (size - 1)
    else:
        return False
    # Two elements lie in the two halves of an axis, or in one of them: in the second, or as far apart as two of it.
    part = np.lib.stride_tricks.as_strided(np.empty(1, f"V{x.itemsize}"), x.shape, x.strides)  # never read
    for axis in range(part.ndim):
        part = np.moveaxis(part, axis, 0)
        while len(part) > 1:
            half = len(part) // 2
            if overlap(part[:half], part[half:]):
                return True
            part = part[half:]
        part = np.moveaxis(part, 0, axis)
    return False
