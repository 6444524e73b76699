// One thread runs at a time.
#pragma once

template <typename T, typename U>
T atomicAdd(T* address, U value) {
  const T old = *address;
  *address = old + T(value);
  return old;
}
template <typename T, typename U>
T atomicMax(T* address, U value) {
  const T old = *address;
  if (T(value) > old) *address = value;
  return old;
}
template <typename T, typename U>
T atomicMin(T* address, U value) {
  const T old = *address;
  if (T(value) < old) *address = value;
  return old;
}
