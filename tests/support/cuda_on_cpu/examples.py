"""Small kernels that do right, and the same with one fault planted: what tests/kernels/test_cuda_on_cpu.py runs."""

from __future__ import annotations

# Each text is the body of a kernel of (const double* x, double* y, long long n), in one block of 64 threads unless its
# test says otherwise; `t` is threadIdx.x.
REVERSED = """
__shared__ double tile[64];
for (int round = 0; round < 2; round++) {
  tile[t] = x[t] + round;
  __syncthreads();  // filled
  y[t] = tile[63 - t];
  __syncthreads();  // emptied
}
"""
NEIGHBOUR = """
__shared__ double tile[64];
tile[t] = x[t];
__syncwarp();
y[t] = tile[t ^ 1];
"""
CLEAN = {
    "reversed": REVERSED,
    "neighbour": NEIGHBOUR,
    # All lanes read, meet in their warps, and one writes.
    "read_then_write": """
        __shared__ double tile[2];
        if (t % 32 == 0) tile[t / 32] = x[t];
        __syncwarp();
        y[t] = tile[t / 32];
        __syncwarp();
        if (t % 32 == 5) tile[t / 32] = -1.0;
        __syncwarp();
        y[t] += tile[t / 32];""",
    # Threads that have ended are not waited for, in the block or in the warp.
    "ended": """
        __shared__ double tile[64];
        tile[t] = x[t];
        if (t % 32 > 7) return;
        __syncthreads();
        y[t] = tile[t < 32 ? t + 32 : t - 32] + __shfl_xor_sync(0xffffffffu, x[t], 1);""",
    # Halves of a warp on ways of their own.
    "halves": """
        if (t % 32 < 16) y[t] = __shfl_xor_sync(0x0000ffffu, x[t], 3);
        else y[t] = __shfl_xor_sync(0xffff0000u, x[t], 5);""",
    "dynamic": """
        extern __shared__ double pool[];
        auto first = pool + 0, second = pool + 64;
        first[t] = x[t];
        second[t] = 2 * x[t];
        __syncthreads();
        y[t] = first[63 - t] + second[t ^ 1];""",
    # 16-byte loads go through raw pointers.
    "vectors": """
        __shared__ double tile[128];
        tile[2 * t] = x[t];
        tile[2 * t + 1] = -x[t];
        __syncthreads();
        const double2 pair = *reinterpret_cast<const double2*>(&tile[2 * (63 - t)]);
        const double2 turned = __shfl_xor_sync(0xffffffffu, make_double2(pair.y, pair.x), 1);
        const float4 four = __shfl_down_sync(0xffffffffu, make_float4(t, t + 1.f, t + 2.f, t + 3.f), 2);
        y[t] = turned.x + 10 * turned.y + 1000 * (four.x + four.y + four.z + four.w);""",
    "tickets": """
        __shared__ int count[1];
        if (t == 0) count[0] = 0;
        __syncthreads();
        atomicAdd(&count[0], 1);
        __syncthreads();
        y[t] = count[0];
        __threadfence();
        atomicAdd(y + 64, x[t]);""",
    "arithmetic": """
        __shared__ double tile[64];
        tile[t] = __ldg(x + t);
        tile[t] += 1;
        tile[t] *= 2.0;
        tile[t] -= fma(1.0, tile[t], -1.0);
        __stcs(y + t, tile[t] + min(__ldcs(x + t), 0.5) + max(2, 3LL));""",
    "gather": "y[t] = x[(t * 7) % n];",
}
FAULTS = {
    # name: (a clean kernel, what is replaced, by what, what the message says)
    "missing_first": (
        REVERSED,
        "__syncthreads();  // filled",
        "",
        r"(race|uninitialised).* thread \(\d+, 0, 0\) reads",
    ),
    "missing_second": (REVERSED, "__syncthreads();  // emptied", "", r"race.* tile\[\d+\]|uninitialised shared memory"),
    "missing_warp": (NEIGHBOUR, "__syncwarp();", "", r"race|uninitialised"),
    "beyond_the_warp": (NEIGHBOUR, "t ^ 1", "63 - t", r"race|uninitialised"),
    "read_and_write": (CLEAN["read_then_write"], "__syncwarp();\n        if", "if", "race: .*writes tile"),
    "half_a_warp": (NEIGHBOUR, "__syncwarp();", "__syncwarp(t % 2 ? 0xaaaaaaaau : 0x55555555u);", "race|uninit"),
    "atomic_and_plain": (CLEAN["tickets"], "__syncthreads();\n        y", "y", r"race.* count\[0\]"),
    "two_sites": (
        REVERSED,
        "__syncthreads();  // filled",
        "if (t < 32) __syncthreads();\n  else __syncthreads();",
        r"divergent barriers.* 32 thread\(s\), first \(0, 0, 0\), wait in __syncthreads at \w+:6; 32 .*at \w+:7",
    ),
    "not_all": (REVERSED, "__syncthreads();  // emptied", "if (t != 5) __syncthreads();", "divergent|race"),
    "warp_and_block": (
        REVERSED,
        "__syncthreads();  // filled",
        "if (t == 3) __syncwarp(); else __syncthreads();",
        "divergent barriers.*__syncwarp .mask 0xffffffff.",
    ),
    "warp_sites": (NEIGHBOUR, "__syncwarp();", "if (t < 9) __syncwarp();\nelse __syncwarp();", "divergent barriers"),
    "half_shuffle": (
        CLEAN["halves"].replace("0x0000ffffu", "~0u"),
        "0xffff0000u",
        "~0u",
        r"divergent barriers.* 32 .*__shfl_xor_sync .mask 0xffffffff.* 32 .*__shfl_xor_sync",
    ),
    "foreign_mask": (CLEAN["halves"], "0x0000ffffu", "0xffff0000u", r"bad mask.*lane \d+ .*leaves it out"),
    "width": (CLEAN["halves"], "x[t], 3)", "x[t], 3, 12)", "bad width.*12"),
    "read_past": (REVERSED, "tile[63 - t]", "tile[64 - t]", r"overrun.*touches tile\[64\] \(64 elements"),
    "read_before": (REVERSED, "tile[63 - t]", "tile[62 - int(t)]", r"overrun.*touches tile\[-1\]"),
    "write_past": (REVERSED, "tile[t] =", "tile[t + 1] =", r"overrun.*thread \(63, 0, 0\) touches tile\[64\]"),
    "dynamic_past": (CLEAN["dynamic"], "pool + 64", "pool + 65", r"overrun.*touches pool\[128\]"),
    "raw_past": (REVERSED, "y[t] =", "(&tile[63])[1 + t] = 1; y[t] =", "overrun: .*byte 512 of tile|address error"),
    "raw_before": (REVERSED, "y[t] =", "(&tile[0])[-1] = 1; y[t] =", "overrun.*byte -1 of tile|address error"),
    "never_written": (REVERSED, "tile[t] =", "if (t != 9) tile[t] =", r"uninitialised shared.*tile\[9\]"),
    "block_before": (REVERSED, "tile[t] =", "if (blockIdx.x == 0) tile[t] =", r"uninitialised.*block \(1, 0, 0\)"),
    "dynamic_unwritten": (CLEAN["dynamic"], "second[t] =", "if (t) second[t] =", r"uninitialised.*pool\[64\]"),
    "unset_register": (
        REVERSED,
        "tile[t] =",
        "double unset; tile[t] = t == 4 ? unset :",
        r"uninitialised register.*\(4, 0, 0\)",
    ),
    "too_much": (REVERSED, "tile[64]", "tile[6145]", "too much shared memory.*49160 bytes"),
    "misaligned": (CLEAN["vectors"], "2 * (63 - t)]", "1]", r"misaligned.*\(misaligned:7\)"),
    "own_array": (
        CLEAN["gather"],
        "y[t] =",
        "double a[4] = {}; a[t % 5] = x[t]; y[t] = a[t % 4] +",
        r"thread \(\d+, 0, 0\).*index outside.*\(own_array:2\)",
    ),
    "misaligned_global": (
        CLEAN["gather"],
        "y[t] =",
        "*(double2*)(y + t / 62) = make_double2(1, 2); y[t] =",
        "misaligned",
    ),
    "wild": (
        REVERSED,
        "y[t] =",
        "if (t == 7) *reinterpret_cast<double*>(16) = 1; y[t] =",
        "wild address|address error",
    ),
    "written_past": (CLEAN["gather"], "y[t] =", "y[t + 1] =", "global memory overrun.*argument 1|address error"),
    "written_before": (CLEAN["gather"], "y[t] =", "y[t - 3ll] =", "global memory overrun.*argument 1|address error"),
}
# What only AddressSanitizer sees; elsewhere it may give wrong numbers.
ADDRESSES = {
    "global_read_past": (CLEAN["gather"], "(t * 7) % n", "t + 1", "address error.*heap-buffer-overflow"),
    "global_read_before": (CLEAN["gather"], "(t * 7) % n", "t - 1ll", "address error.*heap-buffer-overflow"),
    "raw_read_past": (CLEAN["vectors"], "&tile[2 * (63 - t)]", "&tile[0] + 128", "address error.*use-after-poison"),
}

# Kernels with parameters or launches of their own.
OTHERS = {
    "raw": """extern "C" __global__ void raw(const double* x, double* y) {
        __shared__ double tile[64];
        double* unwatched = &tile[0];
        unwatched[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        y[threadIdx.x] = unwatched[63 - threadIdx.x];
    }""",
    "volume": """extern "C" __global__ void volume(long long* y) {
        const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
        y[block * threads + thread] = blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z + 1000 * threadIdx.x
            + 10000 * threadIdx.y + 100000 * threadIdx.z;
    }""",
    "shuffles": """extern "C" __global__ void shuffles(int* y, int width, int by) {
        const int t = threadIdx.x, lane = t % 32;
        y[t] = __shfl_sync(~0u, lane, by, width);
        y[32 + t] = __shfl_up_sync(~0u, lane, by, width);
        y[64 + t] = __shfl_down_sync(~0u, lane, by, width);
        y[96 + t] = __shfl_xor_sync(~0u, lane, by, width);
    }""",
    "absent": """extern "C" __global__ void absent(float* y) {
        if (threadIdx.x == 2) return;
        y[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 2);
    }""",
    "divide": """extern "C" __global__ void divide(long long n, long long* y) { y[0] = 100 / n; }""",
    "unset_tile": """extern "C" __global__ void unset_tile(double* y) {
        __shared__ double tile[64];
        y[threadIdx.x] = (&tile[0])[threadIdx.x];
    }""",
    "last_block": """
        extern "C" __global__ void last_block(const double* x, double* parts, double* y, unsigned* tickets) {
        __shared__ unsigned ticket[1];
        parts[blockIdx.x] = x[blockIdx.x];
        __threadfence();
        if (threadIdx.x == 0) ticket[0] = atomicAdd(tickets, 1u);
        __syncthreads();
        if (ticket[0] != gridDim.x - 1 || threadIdx.x != 0) return;
        for (unsigned i = 0; i < gridDim.x; i++) y[0] += parts[i];
    }""",
    "passed": """
        __device__ double taken(const double* tile, unsigned i) { return tile[63 - i]; }
        extern "C" __global__ void passed(const double* x, double* y) {
        __shared__ double tile[64];
        tile[threadIdx.x] = x[threadIdx.x];
        SYNC;
        y[threadIdx.x] = taken(tile, threadIdx.x);
    }""",
    "mixed": """extern "C" __global__ void mixed(double a, float b, int c, long long d, double* y) {
        y[0] = a + b + c + d;
    }""",
}
# Ways to use a variable that is set only where s > 0: (what is declared, what is returned).
UNSET = {
    "chosen": ("double a; if (s) a = 1;", "a"),
    "counted": ("double a; if (s) a = 0; for (int i = 0; i < 4; i++) a += 1;", "a"),
    "summed": ("double a; if (s) a = 0; for (int i = 0; i < 4; i++) a += x[i];", "a"),
    "single": ("float a; if (s) a = 0; for (int i = 0; i < 4; i++) a += 1;", "a"),
    "integer": ("long long a; if (s) a = 2;", "a"),
    "array": ("double a[4]; for (int i = 0; i < 4 * s; i++) a[i] = x[i];", "a[0] + a[1] + a[2] + a[3]"),
    "loop": ("double a; for (int i = 0; i < s; i++) a = x[i];", "a"),
    "carried": (
        "double a, b; for (int i = 0; i < 4; i++) { if (i >= s) b = a; else b = 1; a = b + x[i]; }",
        "s ? 1 : a",
    ),
    "switched": ("double a; switch (s) { case 1: a = 1; break; case 7: a = 2; }", "a"),
    "reference": ("double a; maybe(a, s);", "a * x[0]"),
}
OTHERS |= {
    f"unset_{name}": f"""__device__ __forceinline__ void maybe(double& a, int s) {{ if (s) a = 1; }}
        extern "C" __global__ void unset_{name}(const double* x, double* y, int s) {{
        {declared}
        y[0] = {returned};
    }}"""
    for name, (declared, returned) in UNSET.items()
}
OTHERS["raw_unsynced"] = OTHERS["raw"].replace("__syncthreads();", "").replace("raw(", "raw_unsynced(")
OTHERS["passed_unsynced"] = OTHERS["passed"].replace("SYNC;", "").replace("passed(", "passed_unsynced(")
OTHERS["passed"] = OTHERS["passed"].replace("SYNC", "__syncthreads()")
