"""Every piece of inline PTX, one small function each. Addresses are Int64 global addresses."""

from __future__ import annotations

from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.arch import inline_ptx

SCALARS = {"s32": Int32, "u32": Uint32, "f32": Float32, "s64": Int64}


def load16(address: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """``ld.global.v4.u32``: 16 bytes that may change between kernels."""
    return inline_ptx(
        "ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def store16(address: Int64, words: tuple[Uint32, Uint32, Uint32, Uint32]) -> None:
    """``st.global.v4.u32``: 16 bytes, also to a peer's memory."""
    inline_ptx(
        "st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def load16_if(
    condition: Boolean, address: Int64, *, streaming: bool
) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes, or zeros where the condition does not hold (nothing is read there).

    Args:
        streaming: nobody writes these bytes while the kernel runs, so ``.nc`` is allowed.
    """
    load = f"ld.global{'.nc' if streaming else ''}.L1::no_allocate.v4.u32"
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; "
        "mov.u32 {$w0}, 0; mov.u32 {$w1}, 0; mov.u32 {$w2}, 0; mov.u32 {$w3}, 0; "
        "@p " + load + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[Int32(condition), address],
    )


def store16_if(
    condition: Boolean, address: Int64, words: tuple[Uint32, Uint32, Uint32, Uint32]
) -> None:
    """``st.global.v4.u32`` where the condition holds, also to a peer's memory."""
    inline_ptx(
        "st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
        predicate=condition,
    )


def unpack(word: Uint32, dtype: type) -> tuple[Float32, ...]:
    """The fp32 values of one word of BFloat16, Float16 (two, low half first) or Float32 (one)."""
    code, count = {
        "BFloat16": ("shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;", 2),
        "Float16": (
            "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; "
            "cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }",
            2,
        ),
        "Float32": ("mov.b32 {$w0}, {$r0};", 1),
    }[dtype.__name__]
    values = inline_ptx(code, write_only_types=[Float32] * count, read_only_args=[word])
    return values if count > 1 else (values,)


def pack(values: tuple[Float32, ...], dtype: type) -> Uint32:
    """The inverse of `unpack`, each value rounded to nearest even."""
    code = {
        "BFloat16": "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        "Float16": "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
        "Float32": "mov.b32 {$w0}, {$r0};",
    }[dtype.__name__]
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[*values])


def load8(address: Int64) -> tuple[Uint32, Uint32]:
    """``ld.global.v2.u32``: 8 bytes that may change between kernels."""
    return inline_ptx(
        "ld.global.v2.u32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
    )


def store8(address: Int64, words: tuple[Uint32, Uint32]) -> None:
    """``st.global.v2.u32``: 8 bytes."""
    inline_ptx("st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words])


def load(address: Int64, kind: str) -> Int32 | Uint32 | Float32 | Int64:
    """``ld.global``: one scalar of kind s32, u32, f32 or s64."""
    return inline_ptx(
        f"ld.global.{kind} {{$w0}}, [{{$r0}}];",
        write_only_types=[SCALARS[kind]],
        read_only_args=[address],
    )


def store(address: Int64, value: Int32 | Uint32 | Float32 | Int64, kind: str) -> None:
    """``st.global``: one scalar of kind s32, u32, f32 or s64, also to a peer's memory."""
    inline_ptx(f"st.global.{kind} [{{$r0}}], {{$r1}};", read_only_args=[address, value])


def load_acquire_sys(address: Int64) -> Int32:
    """``ld.acquire.sys``: a flag; what its writer released before is visible afterwards."""
    return inline_ptx(
        "ld.acquire.sys.global.s32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def store_release_sys(address: Int64, value: Int32) -> None:
    """``st.release.sys``: a flag; publishes what this thread wrote before."""
    inline_ptx("st.release.sys.global.s32 [{$r0}], {$r1};", read_only_args=[address, value])


def add_acq_rel_gpu(address: Int64, value: Int32) -> Int32:
    """``atom.add.acq_rel.gpu``: the old value of a counter of this GPU."""
    return inline_ptx(
        "atom.add.acq_rel.gpu.global.s32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, value],
    )


def fence_sys() -> None:
    """``fence.acq_rel.sys``: orders this thread's accesses for every GPU and the host."""
    inline_ptx("fence.acq_rel.sys;")


def nanosleep(nanoseconds: int) -> None:
    """``nanosleep``: give way for about this long."""
    inline_ptx(f"nanosleep.u32 {nanoseconds};")


def global_nanoseconds() -> Int64:
    """``%globaltimer``: nanoseconds, in coarse steps, comparable within a GPU."""
    return Int64(cute.arch.globaltimer())


def trap() -> None:
    """``trap``: end the kernel; the CUDA context is lost with it."""
    inline_ptx("trap;")


def load_byte(address: Int64) -> Uint32:
    """``ld.global.u8``: one byte, zero-extended."""
    return inline_ptx(
        "ld.global.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


# Loads of one floating-point value as fp32, by dtype.
FLOAT_LOADS = {
    "float32": "ld.global.f32 {$w0}, [{$r0}];",
    "bfloat16": "{ .reg .b16 h; ld.global.b16 h, [{$r0}]; cvt.f32.bf16 {$w0}, h; }",
    "float16": "{ .reg .b16 h; ld.global.b16 h, [{$r0}]; cvt.f32.f16 {$w0}, h; }",
    "float64": "{ .reg .f64 d; ld.global.f64 d, [{$r0}]; cvt.rn.f32.f64 {$w0}, d; }",
}
FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def load_float(address: Int64, dtype: str) -> Float32:
    """One value of a dtype of ``FLOAT_LOADS``, as fp32."""
    return inline_ptx(FLOAT_LOADS[dtype], write_only_types=[Float32], read_only_args=[address])
