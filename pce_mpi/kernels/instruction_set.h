// All loops of an instruction set, in the namespace INSTRUCTION_SET, with vectors of VECTOR_BYTES; included after `host.h`.

// A call in a hot loop costs as much as the loop.
#define INLINED static inline __attribute__((always_inline))

namespace pce {
namespace INSTRUCTION_SET {
namespace {
#include "vectors.h"
#include "loops.h"
#include "rows.h"
#include "walk.h"
#include "tables.h"
#include "plain.h"
#include "divergence.h"
#include "layers.h"
#include "digits.h"
}  // namespace
extern const Loops LOOPS = {fill, write, fill_losses, add_all, find, diverge, gelu, attend, norm};
extern const Products PRODUCTS = {find_exponents, multiply};
}  // namespace INSTRUCTION_SET
}  // namespace pce
