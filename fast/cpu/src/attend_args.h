// What the Python side hands over; fast/cpu/attention.py has the same structure.
#pragma once
#include <cstdint>

// Arrays are row-major. Dtypes: 0 float16, 1 bfloat16, 2 float32. B rows, H kv heads, N tiles, R recent and F first
// tokens.
struct tq_attend_args {
  const void* q;                                          // [B, H group, queries, key_dim] of q_type
  const uint32_t *key_words, *sign_words, *value_words;   // [B, H, N, 64, W]
  const uint16_t *key_scales, *sign_scales, *value_scales;  // float16 [B, H, N, 64]
  const int16_t *base, *base_exponent;                    // [B, H, N, key_dim], [B, H, N]
  const int8_t* factors;                                  // [B, H, key_dim] or null
  const void *key_first, *key_recent;                     // [B, H, F, key_dim], [B, H, R, key_dim] of key_type
  const void *value_first, *value_recent;                 // the same of values
  const void* mask;                                       // by mask_strides, in elements; or null
  const float* sinks;                                     // [H group] or null
  const int64_t* rows;                                    // [B][4]: length, held keys, held values, left padding
  const float *key_signs, *key_signs_two, *key_paley;     // [key_dim] +-1 of streams 0 and 1, [m, key_dim] P forth
  const float *value_signs, *value_paley;                 // [value_dim] +-1, [m, value_dim] P back
  const int16_t *key_centroids, *value_centroids;         // [64] by code, any for 8 bits
  const int16_t* weights;                                 // [2][64]: A and B of section 5
  void* out;                                              // [B, H group, queries, value_dim] of q_type
  int32_t* logits;                                        // scores alone: [B, H group, queries, columns]; else null
  int64_t batch, kv_heads, group, queries;
  int64_t key_dim, value_dim, key_bits, value_bits, prod;
  int64_t key_m, value_m;                                 // D = m 2^k
  int64_t q_type, key_type, value_type;
  int64_t key_tiles, value_tiles;                         // N
  int64_t key_recent_count, value_recent_count, key_first_count, value_first_count;
  int64_t causal, window;                                 // window 0: none
  int64_t mask_type;                                      // -1 bool, else a dtype
  int64_t mask_strides[4];
  int64_t columns;                                        // the longest row
  int64_t key_shift, sign_shift, value_shift;             // κ of keys, κ2, κ of values
  int64_t threads;
  double factor;                                          // a of section 4, a float32 number
};
