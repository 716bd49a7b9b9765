// What scoring, weighting and the output have in common. Sections 4 and 5 of docs/numerics.md.

// Places in `meta`: first the call, then META_ROW numbers for every row of the batch.
#define META_KV_HEADS 0
#define META_GROUP 1
#define META_QUERIES 2
#define META_TILES 3
#define META_VALUE_TILES 4
#define META_RECENT 5
#define META_VALUE_RECENT 6
#define META_FIRST 7
#define META_VALUE_FIRST 8
#define META_CAUSAL 9
#define META_WINDOW 10
#define META_SCALE 11
#define META_SPLITS 12
#define META_GROUPS 13
#define META_MASK_ROW 14
#define META_MASK_HEAD 15
#define META_MASK_QUERY 16
#define META_MASK_COLUMN 17
#define META_COLUMNS 18
#define META_LEVELS 19
#define META_WORK 20
#define META_WORKERS 21
#define META_AFTER 22
#define META_ROWS 24
#define META_ROW 4

// Numbers kept per query beside its sums: three exponents, den as bits, what it met.
#define TAIL 5
#define MET_ALLOWED 1
#define MET_POISON 2
#define TQ_ALL_ROWS ((1u << ROWS) - 1u)

// Whole packed tiles that a query at position i reads (section 2).
inline int tq_packed_tiles(int i) {
  return max(0, (i + 1 - 32) / 64);
}

// One vector of a simdgroup's own: its largest magnitude over D numbers.
inline float tq_largest(threadgroup const float* v, int size, int lane) {
  float largest = 0.0f;
  for (int d = lane; d < size; d += 32) {
    largest = max(largest, fabs(v[d]));
  }
  return simd_max(largest);
}

// `packed` holds the packed sum of one query and is overwritten, `raw` its raw sum; a simdgroup writes the output.
template <typename Raw, typename Out>
inline void tq_write_output(
    threadgroup float* packed, Raw raw, int packed_exponent, int raw_exponent, int den_exponent, float den, int met,
    device const uint* tables, device Out* out, int lane) {
  const float largest = tq_largest(packed, DV, lane);
  const float unit = tq_unit(largest, 13);
  for (int d = lane; d < DV; d += 32) {
    packed[d] = tq_snap(packed[d], unit);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  tq_rotate<DV_M, DV_K>(packed, lane, tables + DV_PALEY_BACK);
  const int x = unit == 0.0f ? TQ_IDENTITY : packed_exponent + tq_exponent(largest) - 26 - KAPPA_V;
  const int y = raw_exponent > TQ_IDENTITY ? raw_exponent - 26 : raw_exponent;
  const int shift = max(x, y) - den_exponent;
  for (int d = lane; d < DV; d += 32) {
    const bool negative = ((tables[TQ_SIGNS + (d >> 5)] >> (d & 31)) & 1u) != 0u;
    const float o = negative ? -packed[d] : packed[d];
    float result = 0.0f;
    if ((met & MET_ALLOWED) != 0) {
      result = (met & MET_POISON) != 0 ? as_type<float>(0x7fc00000)
                                       : tq_quotient(tq_merge(o, x, raw[d], y), max(den, 1.0f), shift);
    }
    out[d] = Out(result);
  }
}
