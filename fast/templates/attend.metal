// Attention of ROWS queries of one kv head with a group of splits of 256 tokens. A row is a pair (query head of the
// group, query); rows next to each other belong to one query. With SCORES the logits are written and nothing else.
//
// Scores: a thread owns a token of the split and unpacks its key once for all rows. Values: a thread owns a pair of coordinates
// and one tile of the split, so packed words are unpacked once for all rows and nothing is reduced across threads.
// With FINAL a group holds all splits of its rows and writes the output; otherwise it leaves its sums for merge.metal.
//
// Threads: 256. Threadgroup memory is counted in fast/attention.py.

threadgroup float4 tg_rotated_in_fours[ROWS * VECTOR / 4];
threadgroup char2 tg_query[ROWS * DK];
threadgroup int tg_query_exponent[3 * ROWS];
threadgroup int tg_position[ROWS];
threadgroup int tg_limit[ROWS];
threadgroup int tg_bad_query[ROWS];
#if HAS_PACKED
threadgroup TABLE_K tg_key_table[TABLE_K_SIZE];
threadgroup int tg_base[4 * ROWS];
#if PROD
threadgroup float tg_twice[ROWS * VECTOR];
#endif
#endif
#if !SCORES
threadgroup float tg_weight_high[64];
threadgroup float tg_weight_low[64];
threadgroup int tg_top[8 * ROWS];
threadgroup int tg_den[8 * ROWS];
threadgroup int tg_raw_top[8 * ROWS];
threadgroup int tg_tile_exponent[12 * ROWS];
threadgroup char2 tg_raw_share[256 * ROWS];
threadgroup float tg_value_unit[256];
threadgroup uint tg_met[16];
threadgroup int tg_exponents[LEVELS * ROWS * 3];
threadgroup float tg_dens[LEVELS * ROWS];
#if HAS_PACKED
threadgroup TABLE_V tg_value_table[TABLE_V_SIZE];
threadgroup float4 tg_share_in_fours[64 * SHARES];
threadgroup float tg_share_top[8 * ROWS];
#endif
#endif

threadgroup float* tg_rotated = (threadgroup float*)tg_rotated_in_fours;
#if HAS_PACKED && !SCORES
threadgroup float* tg_share = (threadgroup float*)tg_share_in_fours;
#endif
const int tid = int(thread_position_in_threadgroup.x);
const int lane = int(thread_index_in_simdgroup);
const int sg = int(simdgroup_index_in_threadgroup);
const int kv_heads = meta[META_KV_HEADS], group = meta[META_GROUP], queries = meta[META_QUERIES];
const int heads = kv_heads * group;
const int blocks = (group * queries + ROWS - 1) / ROWS;
const int split_group = int(threadgroup_position_in_grid.x);
const int causal = meta[META_CAUSAL], window = meta[META_WINDOW];

#if HAS_PACKED
tq_fill_table<BK>(tg_key_table, k_tables, tid, 256);
#endif
#if !SCORES
#if HAS_PACKED
tq_fill_table<BV>(tg_value_table, v_tables, tid, 256);
#endif
if (tid < 64) {
  const uint both = v_tables[TQ_WEIGHTS + tid];
  tg_weight_high[tid] = float(both & 0xffffu);
  tg_weight_low[tid] = float(both >> 16);
}
#if USES_STACK
device float* stack = scratch +
    (int(threadgroup_position_in_grid.y) * meta[META_GROUPS] + split_group) * meta[META_LEVELS] * ROWS * 2 * DV;
for (int at = tid; at < meta[META_LEVELS] * ROWS * 2 * DV; at += 256) {
  stack[at] = 0.0f;
}
#endif
#endif

for (int work = int(threadgroup_position_in_grid.y); work < meta[META_WORK]; work += int(meta[META_WORKERS])) {
const int kv = work / blocks, block = work % blocks;
const int batch_row = kv / kv_heads, head = kv % kv_heads;
const int row_meta = META_ROWS + META_ROW * batch_row;
const int length = meta[row_meta], held = meta[row_meta + 1];
const int rows = min(ROWS, group * queries - block * ROWS);
#if !SCORES && !FINAL
device float* my_sums = sums + (work * meta[META_GROUPS] + split_group) * ROWS * 2 * DV;
device int* my_tails = tails + (work * meta[META_GROUPS] + split_group) * ROWS * TAIL;
#if !USES_STACK
device float* stack = my_sums;
for (int at = tid; at < ROWS * 2 * DV; at += 256) {
  stack[at] = 0.0f;
}
#endif
#endif

// ---- Queries: snapped, divided by the channel factors, rotated (section 4). A simdgroup owns a row.
for (int r = sg; r < ROWS; r += 8) {
  const int m = block * ROWS + r;
  const int l = m / group, h = head * group + m % group;
  const int position = r < rows ? length - meta[META_AFTER] - queries + l : -1;
  const bool real = position >= 0;
  device const QT* query = q + ((batch_row * heads + h) * queries + l) * DK;
  const float scale = as_type<float>(meta[META_SCALE]);
  float largest = 0.0f;
  bool finite = true;
  for (int d = lane; d < DK; d += 32) {
    const float given = real ? float(query[d]) : 0.0f;
    const float x = given * scale;
    finite = finite && tq_finite(given) && tq_finite(x);
    largest = max(largest, tq_finite(x) ? fabs(x) : 0.0f);
  }
  finite = simd_all(finite);
  largest = finite ? simd_max(largest) : simd_max(0.0f);
  const float unit = tq_unit(largest, 13);
  float divided = 0.0f;
  for (int d = lane; d < DK; d += 32) {
    const float x = (real && finite) ? float(query[d]) * scale : 0.0f;
    const int snapped = int(tq_snap(x, unit));
    const int high = (snapped + 64) >> 7;
    tg_query[r * DK + d] = char2(char(high), char(snapped - 128 * high));
#if HAS_PACKED
    const float u = float(snapped) * tq_pow2(-int(k_factors[kv * DK + d]));
    tg_rotated[r * VECTOR + d] = u;
    divided = max(divided, fabs(u));
#endif
  }
  const int exponent = tq_exponent(largest);
  int rotated_exponent = 0, twice_exponent = 0;
#if HAS_PACKED
  divided = simd_max(divided);
  threadgroup float* v = tg_rotated + r * VECTOR;
  tq_snap_signed(v, DK, divided, k_tables + TQ_SIGNS, lane);
  tq_rotate<DK_M, DK_K>(v, lane, k_tables + TQ_PALEY);
  const float top = tq_largest(v, DK, lane);
#if PROD
  threadgroup float* twice = tg_twice + r * VECTOR;
  for (int d = lane; d < DK; d += 32) {
    twice[d] = v[d];
  }
  tq_snap_signed(twice, DK, top, k_tables + TQ_SIGN_CODE_SIGNS, lane);
  tq_rotate<DK_M, DK_K>(twice, lane, k_tables + TQ_PALEY);
  const float twice_top = tq_largest(twice, DK, lane);
  twice_exponent = exponent + tq_exponent(divided) + tq_exponent(top) + tq_exponent(twice_top) - 39 - KAPPA_SIGN;
  tq_snap_padded(twice, DK, DK_PADDED, twice_top, lane);
#endif
  rotated_exponent = exponent + tq_exponent(divided) + tq_exponent(top) - 26 - KAPPA_K;
  tq_snap_padded(v, DK, DK_PADDED, top, lane);
#endif
  if (lane == 0) {
    tg_query_exponent[3 * r] = exponent;
    tg_query_exponent[3 * r + 1] = rotated_exponent;
    tg_query_exponent[3 * r + 2] = twice_exponent;
    tg_position[r] = position;
    tg_limit[r] = tq_packed_tiles(position);
    tg_bad_query[r] = finite ? 0 : 1;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// ---- Which splits this group reads.
const int newest = tg_position[rows - 1];
const int oldest = max(tg_position[0], 0);
const int tiles = HAS_PACKED ? tq_packed_tiles(newest) : 0;
const int raw_from = tq_packed_tiles(oldest);
const int first_split = split_group * meta[META_SPLITS];
#if SCORES
const int begin = first_split;
const int end = min(first_split + meta[META_SPLITS], (meta[META_COLUMNS] + 255) / 256);
#else
const int begin = max(first_split, window > 0 ? max(oldest - window + 1, 0) / 256 : 0);
const int end = newest < 0 ? begin : min(first_split + meta[META_SPLITS], ((causal != 0 ? newest + 1 : length) + 255) / 256);

if (tid < 3 * ROWS) {
  for (int level = 0; level < meta[META_LEVELS]; level++) {
    tg_exponents[level * ROWS * 3 + tid] = TQ_IDENTITY;
  }
}
threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
int full = 0;
bool any_packed_yet = false, any_raw_yet = false;
const int value_held = meta[row_meta + 2];
uint met_allowed = 0u, met_poison = 0u;
#endif

for (int split = begin; split < end; split++) {
  const int token = 256 * split + tid;
  const int tile = token >> 6;
  const bool any_packed = 4 * split < tiles;
  const bool any_raw = split == 0 || 4 * split + 3 >= raw_from;
  int logit[ROWS];
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    logit[r] = 0;
  }
  uint bad = 0u;

#if HAS_PACKED
  // ---- Packed keys: bases by tile and row, then codes by token.
  if (any_packed) {
    for (int pair = sg; pair < 4 * ROWS; pair += 8) {
      const int of_tile = 4 * split + (pair & 3), r = pair >> 2;
      if (of_tile < tiles) {
        const int at = kv * meta[META_TILES] + of_tile;
        int high = 0, low = 0;
        for (int d = lane; d < DK; d += 32) {
          const int x = int(k_base[at * DK + d]);
          const char2 two = tg_query[r * DK + d];
          high += int(two.x) * x;
          low += int(two.y) * x;
        }
        high = simd_sum(high);
        low = simd_sum(low);
        if (lane == 0) {
          tg_base[pair] = tq_logit(tq_join(high, low), tg_query_exponent[3 * r] + int(k_base_exponent[at]) - 14);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tile < tiles && token >= 4) {
      const int at = (kv * meta[META_TILES] + tile) * 64 + (token & 63);
      int total[ROWS];
      tq_score<BK>(k_words + long(at) * WORDS_K, tg_key_table, tg_rotated_in_fours, total);
      const float stored = float(k_scales[at]), scale = tq_nan(stored) ? 0.0f : stored;
#if PROD
      int total_signs[ROWS];
      tq_score_signs(k_sign_words + long(at) * WORDS_SIGN, tg_twice, total_signs);
      const float sign_scale = tq_nan(stored) ? 0.0f : float(k_sign_scales[at]);
#endif
      TQ_UNROLL
      for (int r = 0; r < ROWS; r++) {
        int sum = tq_logit(float(total[r]) * scale, tg_query_exponent[3 * r + 1]);
#if PROD
        sum += tq_logit(float(total_signs[r]) * sign_scale, tg_query_exponent[3 * r + 2]);
#endif
        logit[r] = tq_clamp28(sum + tg_base[4 * r + (tile & 3)]);
      }
      bad = tq_nan(stored) ? TQ_ALL_ROWS : 0u;
    }
  }
#endif

  // ---- Raw keys, for the rows that read them raw.
  float value_unit = 0.0f;
  int value_exponent = 0;
  if (any_raw && token < length && (tile >= raw_from || token < 4)) {
    device const KT* key = length - token <= held
        ? k_recent + (kv * meta[META_RECENT] + meta[META_RECENT] - length + token) * DK
        : k_first + (kv * meta[META_FIRST] + token) * DK;
    float largest = 0.0f;
    bool finite = true;
    for (int d = 0; d < DK; d++) {
      const float x = float(key[d]);
      finite = finite && tq_finite(x);
      largest = max(largest, fabs(x));
    }
    largest = finite ? largest : 0.0f;
    int high[ROWS], low[ROWS];
    tq_score_raw(key, tq_unit(largest, 14), tg_query, high, low);
    const int exponent = tq_exponent(largest);
    uint raw_bad = 0u;
    TQ_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const bool raw = tile >= tg_limit[r] || token < 4;
      if (raw) {
        logit[r] = tq_logit(tq_join(high[r], low[r]), tg_query_exponent[3 * r] + exponent - 15);
        raw_bad |= 1u << r;
      }
    }
    bad = finite ? bad & ~raw_bad : bad | raw_bad;
#if !SCORES
    device const VT* value = length - token <= value_held
        ? v_recent + (kv * meta[META_VALUE_RECENT] + meta[META_VALUE_RECENT] - length + token) * DV
        : v_first + (kv * meta[META_VALUE_FIRST] + token) * DV;
    largest = 0.0f;
    finite = true;
    for (int d = 0; d < DV; d++) {
      const float x = float(value[d]);
      finite = finite && tq_finite(x);
      largest = max(largest, fabs(x));
    }
    largest = finite ? largest : 0.0f;
    value_unit = tq_unit(largest, 13);
    value_exponent = tq_exponent(largest);
    bad = finite ? bad : bad | raw_bad;
#endif
  }

  // ---- What the rows may look at, and what a mask adds.
  uint allowed = 0u;
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int position = tg_position[r];
    bool may = token < length && position >= 0 && (causal == 0 || token <= position) &&
        (window == 0 || position - token < window);
#if HAS_MASK
    if (may) {
      const int m = block * ROWS + r;
      const long at = long(batch_row) * meta[META_MASK_ROW] + long(head * group + m % group) * meta[META_MASK_HEAD] +
          long(m / group) * meta[META_MASK_QUERY] + (token + meta[row_meta + 3]) * meta[META_MASK_COLUMN];
#if MASK_ADDITIVE
      const float v = float(mask[at]);
      may = as_type<uint>(v) != 0xff800000u;
      if (tq_nan(v)) {
        bad |= 1u << r;
      } else if (may) {
        logit[r] = tq_clamp28(logit[r] + tq_natural_logit(v));
      }
#else
      may = mask[at];
#endif
    }
#endif
    allowed |= may ? 1u << r : 0u;
    bad |= tg_bad_query[r] != 0 ? 1u << r : 0u;
  }

#if SCORES
  if (token < meta[META_COLUMNS]) {
    for (int r = 0; r < rows; r++) {
      const int m = block * ROWS + r;
      const int at = ((batch_row * heads + head * group + m % group) * queries + m / group) * meta[META_COLUMNS] + token;
      logits[at] = ((allowed >> r) & 1u) == 0u ? TQ_NOT_ALLOWED : ((bad >> r) & 1u) != 0u ? TQ_POISON : logit[r];
    }
  }
#else
  // ---- Weights of a tile (section 5): two simdgroups hold one tile.
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int top = simd_max(((allowed >> r) & 1u) != 0u ? logit[r] : -536870912);
    if (lane == 0) {
      tg_top[sg * ROWS + r] = top;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float value_scale = 0.0f;
#if HAS_PACKED
  const bool coded = tile < tiles && token >= 4;
  if (coded) {
    const float stored = float(v_scales[(kv * meta[META_VALUE_TILES] + tile) * 64 + (token & 63)]);
    if (tq_nan(stored)) {
      TQ_UNROLL
      for (int r = 0; r < ROWS; r++) {
        bad |= tile < tg_limit[r] ? 1u << r : 0u;
      }
    } else {
      value_scale = stored;
    }
  }
#endif
  met_allowed |= allowed;
  met_poison |= allowed & bad;
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int top = max(tg_top[(sg & 6) * ROWS + r], tg_top[(sg | 1) * ROWS + r]);
    const int exponent = (top + 4095) >> 12;
    const bool may = ((allowed >> r) & 1u) != 0u;
    const int weight = may ? tq_weight(exponent * 4096 - logit[r], tg_weight_high, tg_weight_low) : 0;
    logit[r] = weight;
    const int den = simd_sum(weight);
    const bool packed = HAS_PACKED && token >= 4 && tile < tg_limit[r];
    const int reach = (!packed && weight > 0) ? 32 - int(clz(uint(weight))) + value_exponent : TQ_IDENTITY;
    const int raw_top = simd_max(reach);
#if HAS_PACKED
    const float share_top = simd_max(packed ? float(weight) * value_scale : 0.0f);
#endif
    if (lane == 0) {
      tg_den[sg * ROWS + r] = den;
      tg_raw_top[sg * ROWS + r] = raw_top;
#if HAS_PACKED
      tg_share_top[sg * ROWS + r] = share_top;
#endif
    }
  }
  tg_value_unit[tid] = value_unit;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const bool packed = HAS_PACKED && token >= 4 && tile < tg_limit[r];
    const int raw_top = max(tg_raw_top[(sg & 6) * ROWS + r], tg_raw_top[(sg | 1) * ROWS + r]);
    int share = 0;
    if (!packed && logit[r] > 0) {
      share = int(rint(float(logit[r]) * tq_pow2(clamp(value_exponent + 13 - raw_top, -40, 13))));
    }
    const int high = (share + 64) >> 7;
    tg_raw_share[tid * ROWS + r] = char2(char(high), char(share - 128 * high));
#if HAS_PACKED
    const float share_top = max(tg_share_top[(sg & 6) * ROWS + r], tg_share_top[(sg | 1) * ROWS + r]);
    const float unit = share_top > 0.0f ? tq_pow2(13 - tq_float_exponent(share_top)) : 0.0f;
    tg_share[tid * SHARES + r] = packed ? rint(float(logit[r]) * value_scale * unit) : 0.0f;
#endif
  }
#if HAS_PACKED
  TQ_UNROLL
  for (int r = ROWS; r < SHARES; r++) {
    tg_share[tid * SHARES + r] = 0.0f;
  }
#endif
  for (int at = tid; at < 4 * ROWS; at += 256) {
    const int t = at / ROWS, r = at % ROWS;
    const int one = 2 * t * ROWS + r, two = one + ROWS;
    const int exponent = (max(tg_top[one], tg_top[two]) + 4095) >> 12;
    const int raw_top = max(tg_raw_top[one], tg_raw_top[two]);
#if HAS_PACKED
    const float share_top = max(tg_share_top[one], tg_share_top[two]);
    tg_tile_exponent[at] = share_top > 0.0f ? exponent + tq_float_exponent(share_top) : TQ_IDENTITY;
#else
    tg_tile_exponent[at] = TQ_IDENTITY;
#endif
    tg_tile_exponent[4 * ROWS + at] = raw_top > TQ_IDENTITY ? exponent + raw_top : TQ_IDENTITY;
    tg_tile_exponent[8 * ROWS + at] = tg_den[one] + tg_den[two] > 0 ? exponent : TQ_IDENTITY;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // ---- Values: eight lanes hold pairs of coordinates next to each other, four times eight the tiles of the split.
  const int own_tile = lane >> 3, this_tile = 4 * split + own_tile;
  const int depth = int(ctz(~uint(split - first_split)));
  any_packed_yet = any_packed_yet || any_packed;
  any_raw_yet = any_raw_yet || any_raw;
  for (int eight = sg; eight < (DV / 2 + 7) / 8; eight += 8) {
    const int pair = 8 * eight + (lane & 7);
    const bool real = 2 * pair < DV;
    TQ_UNROLL
    for (int kind = HAS_PACKED ? 0 : 1; kind < 2; kind++) {
      if (kind == 0 ? !any_packed_yet : !any_raw_yet) {
        continue;
      }
      const bool here = kind == 0 ? any_packed : any_raw;
      float part[2 * ROWS];
      TQ_UNROLL
      for (int at = 0; at < 2 * ROWS; at++) {
        part[at] = 0.0f;
      }
#if HAS_PACKED
      if (kind == 0 && real && this_tile < tiles) {
        const int at = (kv * meta[META_VALUE_TILES] + this_tile) * 64;
        tq_sum_codes<BV>(v_words + long(at) * WORDS_V, pair, tg_value_table, tg_share + 64 * own_tile * SHARES, part);
      }
#endif
      if (kind == 1 && real && any_raw) {
        tq_sum_raw(v_recent + (kv + 1) * meta[META_VALUE_RECENT] * DV - value_held * DV,
                   v_first + kv * meta[META_VALUE_FIRST] * DV, length - value_held, 64 * this_tile,
                   min(64, length - 64 * this_tile), pair, tg_value_unit + 64 * own_tile, tg_raw_share + 64 * own_tile * ROWS, part);
      }
      TQ_UNROLL
      for (int first = 0; first < ROWS; first += 4) {
        const int r = first + own_tile;
        float2 tile_sums[4] = {float2(0.0f), float2(0.0f), float2(0.0f), float2(0.0f)};
        if (here) {
          tq_gather_tiles(part, first, lane, tile_sums);
        }
        if (real && r < rows) {
          float2 total = tile_sums[0];
          int x = here ? tg_tile_exponent[(4 * kind + 0) * ROWS + r] : TQ_IDENTITY;
          if (here) {
            TQ_UNROLL
            for (int t = 1; t < 4; t++) {
              const int y = tg_tile_exponent[(4 * kind + t) * ROWS + r];
              total = float2(tq_merge(total.x, x, tile_sums[t].x, y), tq_merge(total.y, x, tile_sums[t].y, y));
              x = max(x, y);
            }
          }
          tq_push(stack, tg_exponents, depth, full, r, kind, pair, total, x);
        }
      }
    }
  }
  if (tid < rows) {
    int x[3] = {TQ_IDENTITY, TQ_IDENTITY, TQ_IDENTITY};
    float den = 0.0f;
    TQ_UNROLL
    for (int t = 0; t < 4; t++) {
      x[0] = max(x[0], any_packed ? tg_tile_exponent[(4 * 0 + t) * ROWS + tid] : TQ_IDENTITY);
      x[1] = max(x[1], any_raw ? tg_tile_exponent[(4 * 1 + t) * ROWS + tid] : TQ_IDENTITY);
      const int sum = tg_den[2 * t * ROWS + tid] + tg_den[(2 * t + 1) * ROWS + tid];
      const int y = tg_tile_exponent[(8 + t) * ROWS + tid];
      den = tq_merge(den, x[2], float(sum), y);
      x[2] = max(x[2], y);
    }
    for (int level = 0; level < depth; level++) {
      if (((full >> level) & 1) != 0) {
        const int at = (level * ROWS + tid) * 3;
        den = tq_merge(tg_dens[level * ROWS + tid], tg_exponents[at + 2], den, x[2]);
        TQ_UNROLL
        for (int kind = 0; kind < 3; kind++) {
          x[kind] = max(x[kind], tg_exponents[at + kind]);
        }
      }
    }
    TQ_UNROLL
    for (int kind = 0; kind < 3; kind++) {
      tg_exponents[(depth * ROWS + tid) * 3 + kind] = x[kind];
    }
    tg_dens[depth * ROWS + tid] = den;
  }
  full = (full & ~((1 << depth) - 1)) | (1 << depth);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
}

#if !SCORES
// ---- What is left in the tree, from the smallest level up; the sums' owners fold them into level 0.
met_allowed = simd_or(met_allowed);
met_poison = simd_or(met_poison);
if (lane == 0) {
  tg_met[sg] = met_allowed;
  tg_met[8 + sg] = met_poison;
}
#if USES_STACK
#if FINAL
device float* total_sums = stack;
#else
device float* total_sums = my_sums;
#endif
for (int eight = sg; eight < (DV / 2 + 7) / 8; eight += 8) {
  const int pair = 8 * eight + (lane & 7);
  for (int r = lane >> 3; r < ROWS; r += 4) {
    for (int kind = 0; kind < 2; kind++) {
      float2 total = float2(0.0f);
      int x = TQ_IDENTITY;
      for (int level = 0; level < meta[META_LEVELS] && r < rows; level++) {
        const int y = ((full >> level) & 1) != 0 ? tg_exponents[(level * ROWS + r) * 3 + kind] : TQ_IDENTITY;
        if (y > TQ_IDENTITY && 2 * pair < DV) {
          device const float* left = stack + ((level * ROWS + r) * 2 + kind) * DV + 2 * pair;
          total = float2(tq_merge(left[0], y, total.x, x), tq_merge(left[1], y, total.y, x));
          x = max(x, y);
        }
      }
      if (2 * pair < DV) {
        device float* to = total_sums + (r * 2 + kind) * DV + 2 * pair;
        to[0] = total.x;
        to[1] = total.y;
      }
    }
  }
}
#else
#if FINAL
#error "a final group keeps a stack"
#endif
#endif
threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
if (tid < ROWS) {
  int x[3] = {TQ_IDENTITY, TQ_IDENTITY, TQ_IDENTITY};
  float den = 0.0f;
  for (int level = 0; level < meta[META_LEVELS] && tid < rows; level++) {
    if (((full >> level) & 1) != 0) {
      const int at = (level * ROWS + tid) * 3;
      den = tq_merge(tg_dens[level * ROWS + tid], tg_exponents[at + 2], den, x[2]);
      TQ_UNROLL
      for (int kind = 0; kind < 3; kind++) {
        x[kind] = max(x[kind], tg_exponents[at + kind]);
      }
    }
  }
  uint allowed = 0u, poison = 0u;
  for (int i = 0; i < 8; i++) {
    allowed |= tg_met[i];
    poison |= tg_met[8 + i];
  }
  int met = (((allowed >> tid) & 1u) != 0u ? MET_ALLOWED : 0) | (((poison >> tid) & 1u) != 0u ? MET_POISON : 0);
#if FINAL
  TQ_UNROLL
  for (int kind = 0; kind < 3; kind++) {
    tg_exponents[tid * 3 + kind] = x[kind];
  }
  tg_dens[tid] = den;
  tg_bad_query[tid] = met;
#else
  my_tails[tid * TAIL] = x[0];
  my_tails[tid * TAIL + 1] = x[1];
  my_tails[tid * TAIL + 2] = x[2];
  my_tails[tid * TAIL + 3] = as_type<int>(den);
  my_tails[tid * TAIL + 4] = met;
#endif
}
#if FINAL
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int r = sg; r < rows; r += 8) {
  const int m = block * ROWS + r;
  const int h = head * group + m % group;
  int met = tg_bad_query[r], den_exponent = tg_exponents[3 * r + 2];
  float den = tg_dens[r];
#if HAS_SINKS
  den = tq_add_sink(den, den_exponent, float(sinks[h]), den_exponent, met, tg_weight_high, tg_weight_low);
#endif
  threadgroup float* packed = tg_rotated + r * VECTOR;
  for (int d = lane; d < DV; d += 32) {
    packed[d] = stack[2 * r * DV + d];
  }
  tq_write_output(packed, stack + (2 * r + 1) * DV, tg_exponents[3 * r], tg_exponents[3 * r + 1], den_exponent, den, met,
                  v_tables, out + ((batch_row * heads + h) * queries + m / group) * DV, lane);
}
#endif
#endif
threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
}
