// Nothing here is complex.
#pragma once
template <typename T>
struct complex {
  T real, imag;
};
