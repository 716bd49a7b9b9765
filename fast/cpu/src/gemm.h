// C = A B over pairs of int16: C[r][n] = sum over k of A[r][k].low B[k][n].low + A[r][k].high B[k][n].high, in int32.
// Every sum of the contract that goes through here fits int32, so the order of summation is free.
#pragma once
#include "lanes.h"

namespace tq::attention {

template <int ROWS, int COLUMNS>
TQ_INLINE void gemm_block(int depth, const uint32_t* a, size_t lda, const uint32_t* b, size_t ldb, int32_t* c,
                          size_t ldc) {
  // Few sums would wait for each other: they are kept twice.
  constexpr int CHAINS = ROWS * COLUMNS <= 4 ? 2 : 1;
  I acc[CHAINS][ROWS][COLUMNS];
  TQ_UNROLL
  for (int i = 0; i < CHAINS; i++) {
    TQ_UNROLL
    for (int r = 0; r < ROWS; r++) {
      TQ_UNROLL
      for (int n = 0; n < COLUMNS; n++) acc[i][r][n] = I{};
    }
  }
  const auto step = [&](int i) __attribute__((always_inline)) {
    U of_b[COLUMNS];
    TQ_UNROLL
    for (int n = 0; n < COLUMNS; n++) of_b[n] = load<U>(b + n * LANES);
    TQ_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const U of_a = broadcast(a[r * lda]);
      TQ_UNROLL
      for (int n = 0; n < COLUMNS; n++) acc[i][r][n] = dot(acc[i][r][n], of_a, of_b[n]);
    }
    a++;
    b += ldb;
  };
  int k = 0;
  for (; k + CHAINS <= depth; k += CHAINS) {
    step(0);
    if (CHAINS > 1) step(CHAINS - 1);
  }
  if (k < depth) step(0);
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    TQ_UNROLL
    for (int n = 0; n < COLUMNS; n++) {
      store(c + r * ldc + n * LANES, CHAINS > 1 ? acc[0][r][n] + acc[CHAINS - 1][r][n] : acc[0][r][n]);
    }
  }
}

template <int COLUMNS>
inline void gemm_columns(int rows, int depth, const uint32_t* a, size_t lda, const uint32_t* b, size_t ldb, int32_t* c,
                         size_t ldc) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) gemm_block<4, COLUMNS>(depth, a + r * lda, lda, b, ldb, c + r * ldc, ldc);
  a += r * lda;
  c += r * ldc;
  if (rows - r == 3) gemm_block<3, COLUMNS>(depth, a, lda, b, ldb, c, ldc);
  if (rows - r == 2) gemm_block<2, COLUMNS>(depth, a, lda, b, ldb, c, ldc);
  if (rows - r == 1) gemm_block<1, COLUMNS>(depth, a, lda, b, ldb, c, ldc);
}

// columns: a multiple of 16. a [rows, depth], b [depth, columns], c [rows, columns] with row strides lda, ldb, ldc.
inline void gemm(int rows, int columns, int depth, const uint32_t* a, size_t lda, const uint32_t* b, size_t ldb,
                 int32_t* c, size_t ldc) {
#if defined(TQ_AVX2)
  constexpr int WIDE = 2;  // of 16 registers
#else
  constexpr int WIDE = 4;
#endif
  int n = 0;
  for (; n + WIDE * LANES <= columns; n += WIDE * LANES) {
    gemm_columns<WIDE>(rows, depth, a, lda, b + n, ldb, c + n, ldc);
  }
  for (; n < columns; n += LANES) gemm_columns<1>(rows, depth, a, lda, b + n, ldb, c + n, ldc);
}

}  // namespace tq::attention
