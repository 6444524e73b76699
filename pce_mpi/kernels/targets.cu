// Class numbers on a GPU: a thread for each. Launched by cuda.py.
#include <softmax_of_row.cuh>

namespace pce {

// The local columns of targets, -1 for rows that do not count, and which rows count. `wrong` becomes 1 if a target of a
// row that counts is no class. An unsigned number that is negative here is none. Nothing is `ignored` if no number `can_be`.
__global__ void __launch_bounds__(BLOCK_THREADS)
    fill_target_columns(const int64_t* targets, int64_t rows, int64_t ignored, bool can_be, int64_t class_start,
                        int64_t num_classes, int64_t* columns, bool* valid, int* wrong) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  const int64_t target = targets[row];
  const bool counts = !can_be || target != ignored, is_class = target >= 0 && target < num_classes;
  columns[row] = counts && is_class ? target - class_start : -1;
  valid[row] = counts;
  if (counts && !is_class) *wrong = 1;
}

}  // namespace pce
