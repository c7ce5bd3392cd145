// What an operation's tensors come to.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

namespace keepstep {

// Returns the index of a type in monitor/records.py's DTYPES.
inline uint8_t dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kBool: return 1;
    case at::kByte: return 2;
    case at::kChar: return 3;
    case at::kShort: return 4;
    case at::kInt: return 5;
    case at::kLong: return 6;
    case at::kHalf: return 7;
    case at::kBFloat16: return 8;
    case at::kFloat: return 9;
    case at::kDouble: return 10;
    case at::kFloat8_e4m3fn: return 11;
    case at::kFloat8_e4m3fnuz: return 12;
    case at::kFloat8_e5m2: return 13;
    case at::kFloat8_e5m2fnuz: return 14;
    case at::kComplexFloat: return 15;
    case at::kComplexDouble: return 16;
    default: return 17;
  }
}

struct Payload {
  uint64_t nbytes = 0;
  uint8_t dtype = 0;
  c10::Device device{c10::kCPU};

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (dtype == 0) {
      dtype = dtype_code(tensor.scalar_type());
      device = tensor.device();
    }
    // The size of a sparse tensor depends on its data.
    if (tensor.layout() == at::kStrided) nbytes += tensor.nbytes();
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) add(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& inner : value.toListRef()) add(inner);
    }
  }
};

}  // namespace keepstep
