// The loss without options and its gradient in C++ and MPI: the bits of the vectors, on any number of ranks.
//
//     python -m pce_mpi conformance --export vectors --bits     # needs safetensors
//     include=$(python -c 'import pce_mpi; print(pce_mpi.get_include())')
//     mpicxx -std=c++17 -O2 -ffp-contract=off -I$include examples/loss.cpp -o loss
//     mpiexec -n 3 ./loss vectors/float32/plain/*.safetensors
#include <mpi.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "pce_mpi.h"

using namespace pce;
const Call CALL = {0, {1.0, 0.0}};  // no options, scale 1, no softcap
const int WORDS = words_of(CALL.fields);

// The file of a vector, or what is wrong with it: its tensors are in float32, but for the targets, in int64.
struct File {
    std::string content, problem;

    explicit File(const std::string &path) {
        errno = 0;
        std::ifstream stream(path, std::ios::binary);
        std::ostringstream whole;
        if (stream && path.find("plain/") != std::string::npos) whole << stream.rdbuf();
        content = whole.str();
        if (errno) problem = std::string("cannot be read: ") + strerror(errno);
        else if (!is_vector()) problem = "is no vector of float32/plain: loss.cpp begins with how to write them";
    }
    bool is_vector() const {
        if (content.find("\"logits\":{\"dtype\":\"F32\"") == std::string::npos) return false;
        if (header() > content.size()) return false;
        for (const char *name : {"logits", "targets", "expected_loss", "expected_dlogits"})
            if (content.find(std::string("\"") + name + "\":{") == std::string::npos ||
                8 + header() + number(name, "data_offsets", 1) > content.size())
                return false;
        return true;
    }
    uint64_t header() const { return *(const uint64_t *)content.data(); }  // its length
    // Number `i` of those that follow `key` in what the header says of a tensor.
    long number(const std::string &tensor, const std::string &key, int i) const {
        size_t at = content.find("\"" + key + "\":[", content.find("\"" + tensor + "\":{")) + key.size() + 4;
        while (i--) at = content.find(',', at) + 1;
        return std::stol(content.substr(at, 20));
    }
    template <class T> const T *tensor(const std::string &name) const {
        return (const T *)&content[8 + header() + number(name, "data_offsets", 0)];
    }
};

// The operator of the all-reduce, which merges the states of rows.
void merge_states(void *from, void *to, int *rows, MPI_Datatype *) {
    uint64_t *a = (uint64_t *)from, *b = (uint64_t *)to;
    for (int r = 0; r < *rows; r++, a += WORDS, b += WORDS) {
        State state = State::load<Single>(a, CALL), other = State::load<Single>(b, CALL);
        merge<Single>(state, other, CALL);
        state.store<Single>(b, CALL);
    }
}

bool equal(float a, float b) { return a != a ? b != b : memcmp(&a, &b, sizeof a) == 0; }  // any nan is a nan

// Compute the results of a vector; return how many numbers have other bits than in its file, on all ranks together.
long differences(const File &file, int rank, int ranks) {
    const long rows = file.number("logits", "shape", 0), classes = file.number("logits", "shape", 1);
    const long first = classes * rank / ranks, last = classes * (rank + 1) / ranks;
    const float *logits = file.tensor<float>("logits"), *gradient = file.tensor<float>("expected_dlogits");
    const int64_t *targets = file.tensor<int64_t>("targets");
    std::vector<uint64_t> states(rows * WORDS);
    for (long r = 0; r < rows; r++) {
        State state = state_of_classes<Single>(logits + r * classes + first, last - first, targets[r] - first, CALL);
        state.store<Single>(&states[r * WORDS], CALL);
    }
    MPI_Datatype element;
    MPI_Op merging;
    MPI_Type_contiguous(8 * WORDS, MPI_BYTE, &element), MPI_Type_commit(&element);
    MPI_Op_create(merge_states, 1, &merging);
    MPI_Allreduce(MPI_IN_PLACE, states.data(), int(rows), element, merging, MPI_COMM_WORLD);

    Sum sums[2] = {{NO_GRID, {0, 0, 0}}, {NO_GRID, {0, 0, 0}}};  // of the rows' losses, and of their weights
    std::vector<RowSoftmax> softmax;
    for (long r = 0; r < rows; r++) {
        softmax.push_back(RowSoftmax::of<Single>(State::load<Single>(&states[r * WORDS], CALL), CALL, {}));
        const RowLoss loss = RowLoss::of(softmax[r], CALL.fields, targets[r] != -100, {});
        add_number(sums[0], loss.loss), add_number(sums[1], loss.weight);
    }
    const Loss mean = Loss::of(sums, true);
    long wrong = !equal(float(mean.value), *file.tensor<float>("expected_loss"));
    for (long r = 0; r < rows; r++) {
        const bool counts = targets[r] != -100;
        const RowGradient row = gradient_row(softmax[r], CALL.fields, counts, -1, counts / mean.divisor, {});
        for (long c = first, i = r * classes + first; c < last; c++, i++)
            wrong += !equal(gradient_of_class<Single>(logits[i], c == targets[r], row, CALL), gradient[i]);
    }
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    return wrong;
}

int main(int count, char **paths) {
    int rank, ranks, status = count < 2 ? 2 : 0;
    MPI_Init(&count, &paths);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank), MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (status && rank == 0) fprintf(stderr, "usage: mpiexec -n N %s vectors/float32/plain/*.safetensors\n", paths[0]);
    for (int i = 1; i < count; i++) {
        const File file(paths[i]);
        int stops = file.problem.empty() ? ranks : rank;  // the first rank that cannot go on
        MPI_Allreduce(MPI_IN_PLACE, &stops, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        if (rank == stops) fprintf(stderr, "%s %s\n", paths[i], file.problem.c_str());
        if (stops < ranks) {
            status = 2;
            continue;
        }
        const long wrong = differences(file, rank, ranks);
        if (rank == 0) printf("%s: %ld numbers have other bits on %d ranks\n", paths[i], wrong, ranks);
        status = std::max(status, wrong ? 1 : 0);
    }
    MPI_Finalize();
    return status;
}
