// The loops with SSE2, NEON, or whatever there is.
#include "host.h"

#define INSTRUCTION_SET baseline
#define VECTOR_BYTES 16
#include "instruction_set.h"
