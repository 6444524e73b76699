// The loops with SSE2, NEON, or whatever there is.
#include "host.h"

#if defined(__x86_64__) && !defined(__clang__)
// SSE2 emulates what its vectors lack by scalars, which no more optimization speeds up: it takes as long to compile again.
#pragma GCC optimize("O1", "peel-loops")
#endif
#define INSTRUCTION_SET baseline
#define VECTOR_BYTES 16
#include "instruction_set.h"
