// d += a b for 16 by 8 results and 16 terms of bf16, over a warp: the fragments of PTX's mma.m16n8k16. With g = lane / 4 and t = lane % 4, a word
// of two terms each, the first in the low half:
//
//   a: row g, terms 2t; row g + 8, terms 2t; row g, terms 2t + 8; row g + 8, terms 2t + 8
//   b: column g, terms 2t; column g, terms 2t + 8
//   d: row g, columns 2t and 2t + 1; row g + 8, columns 2t and 2t + 1

__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])
    );
}
