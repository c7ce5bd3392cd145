// The functions of the CUDA driver that the recorder calls.
//
// The library is used only if the process has loaded it already, and nothing here creates a
// context: a process without a GPU, or with a GPU that it does not use, stays as it is. Neither
// CUDA's headers nor its libraries are needed to build.

#pragma once

namespace keepstep {

using Context = void*;
using Stream = void*;
using Event = void*;

class Driver {
 public:
  // Values of the driver's CUresult.
  enum Result : int {
    SUCCESS = 0,
    DEINITIALIZED = 4,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    CONTEXT_IS_DESTROYED = 709,
    FIRST_OF_CAPTURE = 900,
    LAST_OF_CAPTURE = 908,
  };

  // Returns the driver; null if the process has not loaded it, or it lacks a function.
  static const Driver* get();

  // Null if no context is current in this thread.
  Context current_context() const;
  // Whether a graph is captured on the stream, or the driver does not tell.
  bool is_capturing(Stream stream) const;
  // Null if that fails. Allowed while other threads capture graphs.
  Event create_event() const;

  int (*set_context)(Context);
  int (*record)(Event, Stream);
  int (*query)(Event);
  int (*elapsed_ms)(float*, Event, Event);

  // Lets this thread query events while other threads capture graphs, without breaking those.
  void ignore_captures_of_other_threads() const;

 private:
  static const Driver* load(bool* is_final);

  int (*get_context_)(Context*);
  int (*is_capturing_)(Stream, int*);
  int (*create_)(Event*, unsigned int);
  int (*exchange_capture_mode_)(int*);
};

}  // namespace keepstep
