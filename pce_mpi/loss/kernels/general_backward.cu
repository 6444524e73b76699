// The gradient of the logits with every option, in either arithmetic and into any dtype. Launched by cuda.py.
#include <row_gradient.cuh>
#include <weights.cuh>

constexpr int THREADS = 256;

// dx_c = factor exp(scale (z_c - max)) - weight_factor u_c (null: nothing is subtracted), `held_gradient` at the column
// held apart, all times the slope of z under a softcap; 0 in rows that are not valid. `out` may be the logits.
template <typename T, typename A>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    write_general_gradient(const T* logits, int64 pitch, int64 rows, int64 classes, int chunk, int lanes, void* out,
                           int64 out_pitch, const double* max, const double* factor, const int64* held_column,
                           const double* held_gradient, const bool* valid, double scale, int out_kind,
                           const double* weight_factor, const double* weight, const void* probabilities, int kind,
                           int64 probability_pitch, double keep, double spread, double softcap, double slope) {
  const Place place(rows, classes, chunk, lanes);
  if (place.row >= rows) return;
  const T* row = logits + place.row * pitch + place.first;
  const int64 to = place.row * out_pitch + place.first;
  const Stretch<T> stretch(row, place.count);
  const RowGradient<Exponential<float, A>, A> gradient(max[place.row], scale);
  const double by = gradient.relative(factor[place.row], max[place.row], scale);
  const int held = place.relative(held_column[place.row]);
  const bool counts = valid[place.row];
  const ClassWeights weights{weight == nullptr ? nullptr : weight + place.first, probabilities, kind,
                             place.row * probability_pitch + place.first, keep, spread};

  for (int i = place.lane; i < stretch.body + stretch.edges; i += lanes) {
    const bool single = i >= stretch.body;
    int at = single ? stretch.edge_at(i - stretch.body) : stretch.vector_at(i);
    Vector v = single ? vector_of(row[at]) : load_streaming(row + at);  // before any of it is written to
#pragma unroll 1
    for (const int end = at + (single ? 1 : Storage<T>::width); at < end; ++at) {
      const A x = static_cast<A>(number(next<T>(v)));
      // The slope first: with it, and nothing else of the cap, in registers, all fits.
      const double by_cap = softcap == 0.0 ? 1.0 : cap_slope(x, slope);
      double dz = by * static_cast<double>(gradient.exponential(capped(x, softcap, slope)));
      if (weight_factor != nullptr) dz -= weight_factor[place.row] * weights[at];
      if (at == held) dz = held_gradient[place.row];
      set_element(out, out_kind, to + at, counts ? dz * by_cap : 0.0);
    }
  }
}
