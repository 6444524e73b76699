// A kernel as its user writes it: the loss of each row and its gradient, a block a row, with the bits of the package.
#include <pce_mpi.h>

using namespace pce;

constexpr int THREADS = 64;

extern "C" __global__ void loss_and_gradient(const float *logits, const int64_t *targets, int64_t classes, double scale,
                                             float *losses, float *gradients) {
    __shared__ unsigned char memory[THREADS * sizeof(State)];
    State *states = (State *)memory;
    const int thread = int(threadIdx.x);
    const Call call = {0, {scale, 0.0}};
    const int64_t row = blockIdx.x, target = targets[row];
    logits += row * classes;
    gradients += row * classes;

    // Every thread has some classes. The order of the merges decides no bit.
    State mine = State::identity();
    for (int64_t c = thread; c < classes; c += THREADS) {
        State one = state_of_class<Single>(logits[c], c == target, call);
        merge<Single>(mine, one, call);
    }
    states[thread] = mine;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) merge<Single>(states[thread], states[thread + half], call);
    }
    __syncthreads();

    const RowSoftmax softmax = RowSoftmax::of<Single>(states[0], call, {});
    const bool counts = target >= 0;
    if (thread == 0) losses[row] = float(RowLoss::of(softmax, call.fields, counts, {}).loss);
    const RowGradient gradient = gradient_row(softmax, call.fields, counts, -1, counts ? scale : 0.0, {});
    for (int64_t c = thread; c < classes; c += THREADS)
        gradients[c] = gradient_of_class<Single>(logits[c], c == target, gradient, call);
}
