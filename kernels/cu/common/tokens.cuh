// A step's inputs as every kernel sees them. They live in device memory, so that a recorded step holds for any values.
#pragma once
#include "ptx.cuh"

// Tokens of a step; rows behind the last token have position -1 and take part in nothing.
struct Tokens {
    const i32 *id;
    const i32 *position;
    const i32 *sequence;
    const i32 *tables; // [sequences][pages]: page of each stretch of a sequence
    i32 pages;         // entries of one table
    i32 page;          // tokens per page
};

// Row of the cache that holds `position` of the sequence of token `t`.
__device__ __forceinline__ i64 cache_row(const Tokens &tokens, int t, int position) {
    const i32 page = tokens.tables[(i64)tokens.sequence[t] * tokens.pages + position / tokens.page];
    return (i64)page * tokens.page + position % tokens.page;
}
