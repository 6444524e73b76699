// Forward in float32, also with label smoothing and for statistics: the states. Each logit is read once. Launched by
// cuda.py.
#include <groups.cuh>
#include <reduction.cuh>

namespace pce {

// The sum of logits, in limbs. Most are multiples of 2^-36 of a size up to 2^17: float64 adds those without rounding.
template <typename T>
class LogitSum {
  // From this size on logits are such multiples; those of float16 always are.
  static constexpr double LEAST =
      Storage<T>::dtype == FLOAT32 ? 0x1p-13 : Storage<T>::dtype == BFLOAT16 ? 0x1p-29 : 0.0;
  static constexpr double UNIT = 0x1p36;

  int64_t whole_ = 0, units_ = 0;  // sums of integer parts, and in units of 2^-36
  float largest_ = 0.0f;           // the size of the largest of these logits, or any from 1 on
  Sum others_ = {NO_GRID, {0, 0, 0}};

 public:
  // Whether `add` takes logits of which these are the smallest sizes.
  static __device__ __forceinline__ bool takes(unsigned sizes) {
    return LEAST == 0.0 || min_of_word<T>(sizes) >= LEAST;
  }

  // Add logits of at most 2,047. False, with nothing added, if one is far below 0.
  __device__ __forceinline__ bool add(const Vector (&v)[LOADS]) {
    double sum = 0.0;
    unsigned whole = 0;
    float x[Storage<T>::width];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      unpack<T>(v[i], x);
#pragma unroll
      for (int j = 0; j < Storage<T>::width; ++j) {
        sum += wide(x[j]);
        whole += static_cast<unsigned>(static_cast<int>(x[j]));
      }
    }
    const bool usable = magnitude(sum) <= 0x1p16;
    units_ += usable ? static_cast<int64_t>(sum * UNIT) : 0;
    whole_ += usable ? static_cast<int>(whole) : 0;
    if (usable && largest_ < 1.0f) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        unpack<T>(v[i], x);
#pragma unroll
        for (int j = 0; j < Storage<T>::width; ++j) largest_ = maximum_or_nan(largest_, size_of(x[j]));
      }
    }
    return usable;
  }

  // Add any logit.
  __device__ __forceinline__ void add_any(double x, const Transform& transform) {
    const double size = magnitude(x);
    if (size >= LEAST && size <= 0x1p17) {
      whole_ += static_cast<int64_t>(x);
      units_ += static_cast<int64_t>(x * UNIT);
      largest_ = maximum_or_nan(largest_, narrow(size));
    } else if (x != 0.0) {
      add_weighted_logit(others_, x, 1.0, transform);
    }
  }

  __device__ __forceinline__ Sum limbs() const {
    const auto units = static_cast<uint64_t>(units_), shifted = units << WIDE;
    Sum sum = others_;
    if (largest_ >= 1.0f) sum.add({0, {shifted, units, static_cast<uint64_t>(whole_)}});
    if (largest_ > 0.0f && largest_ < 1.0f) sum.add({-1, {0, shifted, units}});
    return sum;
  }
};

// The sum of exp(z) z, in limbs.
class EntropySum {
  // Digits of WIDE bits of numbers in units of the grid, each cut to a whole number.
  static constexpr double BASE = static_cast<double>(int64_t(1) << WIDE);
  double first_ = 0.0, second_ = 0.0, third_ = 0.0;
  Sum limbs_ = {NO_ENTROPY, {0, 0, 0}};
  uint32_t unit_ = 0;  // of the exponent of exp(z), in the upper word of a float64

  // Add a number below 1, times BASE.
  __device__ __forceinline__ void add_below_one(double v) {
    const double digit = truncated(v);
    second_ += digit;
    first_ += truncated((v - digit) * BASE);
  }

 public:
  // `add` takes logits of which the largest is in this range; beside it, those below LEAST count for nothing.
  static constexpr float MOST = 250.0f, LOWEST = -30.0f, LEAST = -400.0f;
  // In units of a coarser grid, which `add_any` may have raised, exp(LEAST) has no exponent of a float64.
  static constexpr int COARSEST = 12;

  // Move the digits, of at most 2^16 numbers, to the limbs.
  __device__ __forceinline__ void add_digits() {
    auto sum = static_cast<uint64_t>(static_cast<int64_t>(third_));
    limbs_.limbs[2] += sum;
    sum = (sum << WIDE) + static_cast<uint64_t>(static_cast<int64_t>(second_));
    limbs_.limbs[1] += sum;
    limbs_.limbs[0] += (sum << WIDE) + static_cast<uint64_t>(static_cast<int64_t>(first_));
    first_ = second_ = third_ = 0.0;
  }

  // Raise the grid for logits of which `highest`, with that exponential, is the largest, and set the largest logit that
  // needs no coarser one. False if `add` cannot take them.
  __device__ __forceinline__ bool rises_to(float highest, const Exponential<float>& e, float& bound) {
    if (!(highest <= MOST && highest >= LOWEST)) return false;
    add_digits();
    const Parts parts = split(static_cast<double>(fixed_point(e.t)) * wide(highest));
    const int64_t exponent = parts.e - 1 + e.n - Single::POINT, to = floor_div(exponent, WIDE);
    // So near the next grid that a smaller logit may need it.
    if (exponent - WIDE * to == WIDE - 1 && magnitude(parts.m) > 1.0 - 0x1p-20) return false;
    if (parts.m != 0.0) limbs_.raise(to);
    if (limbs_.grid > COARSEST) return false;
    if (limbs_.grid < -1) return false;  // products of smaller logits may be larger
    unit_ = static_cast<uint32_t>(-Single::POINT - WIDE * static_cast<int>(limbs_.grid)) << 20;
    const double end = 0.69314 * WIDE * static_cast<double>(limbs_.grid + 1);
    bound = limbs_.grid < 0 ? 0.567f : narrow(end - log(end));  // z + log z < end
    return true;
  }

  // Add a logit from its exponential. `exact`: the product is.
  __device__ __forceinline__ void add(float z, uint32_t biased, uint32_t fixed, bool exact) {
    const uint64_t exponent = (biased << 20) + unit_;  // the bias has no bits there
    const double e = from_bits(bits(static_cast<double>(fixed)) + (exponent << 32)), product = e * wide(z);
    const double digit = truncated(product);
    third_ += digit;
    add_below_one((product - digit) * BASE);
    if (!exact) add_below_one(__fma_rn(e, wide(z), -product) * BASE);
  }

  // Add any finite logit from its exponential, or take it `away` from a sum that has it.
  __device__ __forceinline__ void add_any(double x, const Exponential<float>& e, bool away,
                                          const Transform& transform) {
    Sum sum = {NO_ENTROPY, {0, 0, 0}};
    add_digits();
    add_entropy<Single>(sum, fixed_point(e.t), e.n - Single::POINT, x, transform);
    for (int j = 0; away && j < 3; ++j) sum.limbs[j] = 0 - sum.limbs[j];
    limbs_.add(sum);
  }

  __device__ __forceinline__ void forget() { *this = EntropySum(); }

  __device__ __forceinline__ Sum& limbs() {
    add_digits();
    return limbs_;
  }
};

// The exponentials of a thread's logits, summed as digits of 21 bits: the limb j is sum_i digit_(j + i) 2^(21 i). With
// the field ENTROPY also their products with the logits.
template <Way way, int FIELDS>
class Exponentials {
  // The fast way takes logits z of which the largest is in this range. Beside it, those below -2,048 count for nothing.
  static constexpr float MOST = 2047.0f, LEAST = -1848.0f;
  static constexpr double LN_2 = 0.69314;
  static constexpr uint32_t DIGIT = (1u << Single::WIDTH) - 1;
  static constexpr bool ENTROPIES = (FIELDS & ENTROPY) != 0;

  Reduction<way> reduction_;
  float scale_, inverse_;
  float lowest_;  // logits below count for nothing, and float64 does not reduce them
  uint32_t limit_ = 0;  // the exponent of the grid's largest element, in the form of `bits(k)` in `add`

  __device__ __forceinline__ float over_scale(float z) const { return way != PLAIN ? product32(z, inverse_) : z; }

 public:
  Sum digits;
  EntropySum entropy;
  float top;    // the largest logit; nan if one is
  float bound;  // a larger logit needs a coarser grid

  __device__ __forceinline__ explicit Exponentials(double scale)
      : reduction_(scale),
        scale_(narrow(scale)),
        inverse_(narrow(1.0 / scale)),
        lowest_(over_scale(ENTROPIES ? EntropySum::LEAST : -4096.0f)) {
    forget();
    top = bound;
  }

  __device__ __forceinline__ void forget() {
    digits = {NO_SUM, {0, 0, 0}};
    entropy.forget();
    bound = from_bits(0xff800000u);
  }

  // Forget logits of which `before` was the largest, if they do not count beside another largest one.
  __device__ __forceinline__ void outgrow(float before, float largest, const Transform& transform) {
    if (before != largest && before == before && is_huge(wide(largest), transform)) forget();
  }

  // Raise the grid for logits of which `highest` is the largest. False if `add` cannot take them.
  __device__ __forceinline__ bool rises_to(float highest) {
    const float z = way != PLAIN ? product32(highest, scale_) : highest;
    if (!(z <= MOST && z >= LEAST)) return false;
    const int n = static_cast<int>(reduction_(highest).n) - MAGIC32_BITS;
    digits.raise(floor_div(n, Single::WIDTH));
    const int64_t largest = Single::WIDTH * digits.grid + Single::WIDTH - 1;
    if (largest > 4096) return false;  // the grid of a logit that was beyond MOST
    float most = MOST;
    if (ENTROPIES && !entropy.rises_to(highest, exponential<Single>(wide(highest), {1.0, 0.0}), most)) return false;
    limit_ = static_cast<uint32_t>(static_cast<int>(largest) + MAGIC32_BITS);
    const double end = static_cast<double>(largest) * LN_2;
    bound = over_scale(narrow(end < wide(most) ? end : wide(most)));
    return true;
  }

  // Add logits to the low halves of three limbs; none is larger than `bound`, or than the logit that the grid has been
  // raised to.
  template <typename T>
  __device__ __forceinline__ void add(const Vector& logits, uint32_t (&sums)[3]) {
    constexpr int N = Storage<T>::width;
    float x[N];
    unpack<T>(logits, x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float v = ENTROPIES || way == SCALED_IN_DOUBLE ? maximum_or_nan(x[i], lowest_) : x[i];
      const Reduced reduced = reduction_(v);
      // 64 or more for each z from -infinity to -2,048, also where float32 has no integer n: its element is shifted
      // away, whatever it is.
      const uint32_t shift = limit_ - reduced.n;
      const uint32_t fixed = fixed_point(polynomial(reduced.rest));
      const uint64_t element = shifted_right(static_cast<uint64_t>(fixed) << 32, shift);
      sums[0] += static_cast<uint32_t>(element);
      sums[1] += static_cast<uint32_t>(element >> 21);
      sums[2] += static_cast<uint32_t>(element >> 42);
      if (ENTROPIES) entropy.add(v, reduced.n, fixed, Storage<T>::dtype != FLOAT32);
    }
  }

  // The sums of `add` over at most 2,048 logits: those of the digits do not overflow.
  __device__ __forceinline__ void add_sums(const uint32_t (&sums)[3]) {
    const uint32_t second = sums[1] - (sums[2] << 21), first = sums[0] - (second << 21);
    digits.limbs[0] += first;
    digits.limbs[1] += second;
    digits.limbs[2] += sums[2];
  }

  // Add any logit, after `top` has been raised, or take `away` one that has been added. Beside a huge one only equal
  // ones count.
  __device__ __forceinline__ void add_any(double x, const Transform& transform, bool away = false) {
    if (!finite(x) || (x != wide(top) && is_huge(wide(top), transform))) return;
    const Exponential<float> e = exponential<Single>(x, transform);
    digits.raise(floor_div(e.n, Single::WIDTH));
    bound = from_bits(0xff800000u);  // `rises_to` has to look at the grid
    const int64_t shift = Single::WIDTH * digits.grid + Single::WIDTH - 1 - e.n;
    const uint64_t element =
        shifted_right(static_cast<uint64_t>(fixed_point(e.t)) << 32, static_cast<uint32_t>(shift < 64 ? shift : 64));
    const uint64_t sign = away ? ~uint64_t(0) : 1;
    digits.limbs[0] += sign * (element & DIGIT);
    digits.limbs[1] += sign * (element >> 21 & DIGIT);
    digits.limbs[2] += sign * (element >> 42);
    if (ENTROPIES) entropy.add_any(x, e, away, transform);
  }

  __device__ __forceinline__ Sum limbs() const {
    const uint64_t *d = digits.limbs;
    return {digits.grid, {d[0] + (d[1] << 21) + (d[2] << 42), d[1] + (d[2] << 21), d[2]}};
  }
};

// `states` is (rows, splits, words). FIELDS are those of `fields` that change the loop: WEIGHTED_LOGIT, with the weight 1
// for all classes, HOLD_LARGEST, or this and ENTROPY. The last three come without a scale.
template <typename T, Way way, int FIELDS>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    fill_states(const T* logits, int64_t pitch, int64_t rows, int64_t classes, int chunk, int group_size,
                const int64_t* target_column, const double* weight, double scale, int fields, uint64_t* states,
                int64_t class_start) {
  constexpr int WIDTH = Storage<T>::width;
  constexpr bool HOLDS = (FIELDS & HOLD_LARGEST) != 0, SUMS = (FIELDS & WEIGHTED_LOGIT) != 0;
  constexpr bool ENTROPIES = (FIELDS & ENTROPY) != 0;
  const RowTile tile(rows, classes, chunk, group_size);
  const bool has_row = tile.row < rows;
  const T* row = logits + (has_row ? tile.row * pitch + tile.first_class : 0);
  const VectorizedSpan<T> span(row, tile.count);
  const int target = has_row && target_column != nullptr ? tile.local_index(target_column[tile.row]) : -1;
  const Call call = {fields, {scale, 0.0}};
  Exponentials<way, FIELDS> exponentials(scale);
  LogitSum<T> logit_sum;
  // With HOLD_LARGEST: a logit that is in no sum; the largest logit of vectors, and the round in which it first came.
  float held = exponentials.top;
  float top_of_vectors = exponentials.top;
  int top_round = -1;

  const int step = LOADS * group_size, first_round = span.scalars ? tile.thread_rank - step : tile.thread_rank;
  Vector v[LOADS];
  // The first round has the scalars, if there are any, each as a vector with one element. They fit into one round.
  const auto place = [&](int start, int i) {
    const int index = start + i * group_size;
    return start < 0 ? span.scalar_index(index + step) : span.vector_start(index);
  };
  // Whether a round of vectors may have the target.
  const auto has_target = [&](int start) {
    return static_cast<unsigned>(target - span.vector_start(start)) < static_cast<unsigned>(step * WIDTH);
  };
  // Load a round; `nothing` are the words of the class held apart, and of what there is not.
  const auto load = [&](int start, unsigned nothing) {
    const bool single = start < 0;
    if (!single && start + (LOADS - 1) * group_size < span.vectors) {
      const T* from = row + span.vector_start(start);
#pragma unroll
      for (int i = 0; i < LOADS; ++i) v[i] = load_constant(from + i * group_size * WIDTH);
    } else {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int index = start + i * group_size;
        v[i] = Vector{nothing, nothing, nothing, nothing};
        if (single && index + step < span.scalars) v[i] = vector_of(row[span.scalar_index(index + step)], nothing);
        if (!single && index < span.vectors) v[i] = load_constant(row + span.vector_start(index));
      }
    }
    if (!HOLDS && (single || has_target(start))) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
        if (!single || target == place(start, i))
          mask<T>(v[i], static_cast<unsigned>(target - place(start, i)), nothing);
    }
  };
  const auto largest_of_round = [&] {
    unsigned largest = Storage<T>::minus_inf;
#pragma unroll
    for (int i = 0; i < LOADS * 4; ++i) largest = maximum<T>(largest, v[i / 4].word[i % 4]);
    return max_of_word<T>(largest);
  };

  for (int start = first_round; start < span.vectors; start += step) {
    load(start, Storage<T>::minus_inf);
    float highest = largest_of_round();
    const float before = exponentials.top;
    exponentials.top = maximum_or_nan(before, highest);
    if (HOLDS && start >= 0) {
      const float larger = maximum_or_nan(top_of_vectors, sum32(highest, 0.0f));  // -0 is 0
      if (bits(larger) != bits(top_of_vectors)) top_round = start;
      top_of_vectors = larger;
    }
    unsigned smallest = Storage<T>::minus_inf & 0x7fff7fffu;
    if (SUMS) {
#pragma unroll
      for (int i = 0; i < LOADS * 4; ++i) smallest = minimum_size<T>(smallest, v[i / 4].word[i % 4]);
    }
    float swapped = held;  // is in place of the element `out`
    int out = -1;
    const auto one_by_one = [&](bool to_exponentials) {
#pragma unroll 1
      for (int i = 0; i < LOADS * WIDTH; ++i) {
        const int index = start + i / WIDTH * group_size + (start < 0 ? step : 0);
        if (start < 0 ? i % WIDTH != 0 || index >= span.scalars : index >= span.vectors) continue;
        const int at = place(start, i / WIDTH) + i % WIDTH;
        if (!HOLDS && at == target) continue;
        const double x = i == out ? wide(swapped) : number_of(row[at]);
        if (!SUMS || to_exponentials)
          exponentials.add_any(x, call.transform);
        else
          logit_sum.add_any(x, call.transform);
      }
    };
    bool near = true;
    if (!(highest <= exponentials.bound) && (HOLDS || !exponentials.rises_to(highest))) {
      near = false;
      if (finite(wide(exponentials.top))) {
        exponentials.outgrow(before, exponentials.top, call.transform);
        if (HOLDS && !same(maximum_or_nan(held, highest), held)) {
          // The largest logit is held, and the one that was takes its place.
#pragma unroll
          for (int i = 0; i < LOADS; ++i) {
            float x[WIDTH];
            unpack<T>(v[i], x);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j)
              if (same(x[j], highest)) out = i * WIDTH + j;
          }
          swapped = held;
          held = highest;
#pragma unroll
          for (int i = 0; i < LOADS; ++i) mask<T>(v[i], static_cast<unsigned>(out - i * WIDTH), word_of<T>(swapped));
          highest = largest_of_round();
        }
        near = HOLDS && !is_huge(wide(exponentials.top), call.transform) &&
               (highest <= exponentials.bound || exponentials.rises_to(highest));
        if (!near) one_by_one(true);
      }
      if (!SUMS && !near) continue;
    }
    if (near) {
      uint32_t sums[3] = {0, 0, 0};
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        // A long block of instructions would take more registers than there are.
        if ((ENTROPIES ? i == LOADS / 2 : way == SCALED_IN_DOUBLE) && start + i * group_size >= span.vectors) break;
        exponentials.template add<T>(v[i], sums);
      }
      exponentials.add_sums(sums);
    }
    // Once in 2,048 rounds, of at most 32 logits.
    if (ENTROPIES && (start & (2048 * step - 1)) < step) exponentials.entropy.add_digits();
    if (SUMS) {
      const bool usable = near && LogitSum<T>::takes(smallest);
      const bool whole = start >= 0 && start + (LOADS - 1) * group_size < span.vectors && !has_target(start);
      if (usable && !whole) load(start, 0);
      if (!usable || !logit_sum.add(v)) one_by_one(false);
    }
  }

  const float own = exponentials.top;
  const float top = reduce(own, group_size, [](float a, float b) { return maximum_or_nan(a, b); });
  exponentials.outgrow(own, top, call.transform);
  int64_t first = 0;
  if constexpr (HOLDS) {
    constexpr int64_t NONE = int64_t(1) << 31;
    const auto first_place = [&](int start) {
      int64_t found = NONE;
      load(start, Storage<T>::minus_inf);
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        float x[WIDTH];
        unpack<T>(v[i], x);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j)
          if (same(x[j], top) && place(start, i) + j < found) found = place(start, i) + j;
      }
      return found;
    };
    int64_t found = NONE;
    if (top == from_bits(0xff800000u)) {
      found = 0;
    } else if (same(own, top)) {
      if (same(top_of_vectors, top)) found = first_place(top_round);
      const int64_t scalar = span.scalars ? first_place(first_round) : NONE;
      if (scalar < found) found = scalar;
    }
    first = reduce(found, group_size, [](int64_t a, int64_t b) { return a < b ? a : b; });
    // All other logits join the sums.
    const bool has_top = found == first, holds_top = has_top && same(held, top);
    exponentials.top = top;
#pragma unroll 1
    for (int i = 0; i < 2; ++i)
      if (!holds_top && (i == 0 || has_top)) exponentials.add_any(wide(i == 0 ? held : top), call.transform, i == 1);
  }
  Sum sum = exponentials.limbs(), entropy = exponentials.entropy.limbs(), weighted_logit = logit_sum.limbs();
  reduce_sums(sum, group_size);
  if (ENTROPIES) reduce_sums(entropy, group_size);
  if (SUMS) reduce_sums(weighted_logit, group_size);
  if (!has_row || tile.thread_rank != 0) return;
  State state = State::identity();
  double& largest = HOLDS ? state.held : state.top;
  largest = canonical(HOLDS || top < from_bits(0x7f800000u) ? wide(top) : not_a_number());
  if (finite(largest)) {
    state.sum = sum;
    if (ENTROPIES) state.entropy = entropy;
  }
  if (SUMS) state.weighted_logit = weighted_logit;
  if (HOLDS) state.argmax = class_start + tile.first_class + first;
  if (target >= 0) {
    const double x = canonical(number_of(row[target]));
    (HOLDS ? state.target : state.held) = x;
    if (!HOLDS) state.held_weight = weight == nullptr ? 1.0 : canonical(weight[tile.first_class + target]);
  }
  state.store<Single>(states + (tile.row * gridDim.y + blockIdx.y) * words_of(fields), call);
}

}  // namespace pce
