// Controls the stand-in for CUDA's driver: a library that exports the driver's functions that the
// recorder calls, and simulates streams and events under the test's control. It has a device clock
// that the test sets; nothing completes by itself.

#pragma once

extern "C" {
// Makes a context the current one of this thread, as the job does by using a device.
void stand_in_use(void* context);
void* stand_in_context(int number);
void* stand_in_stream(int number);

// Completes the next `count` events of a stream that have not completed, at this device time.
void stand_in_complete(void* stream, int count, double device_s);
// Number of events of a stream that have not completed.
int stand_in_pending(void* stream);
// All calls about events fail from now on, with this code; 0: none.
void stand_in_fail(int code);

// All events so far are gone, as after a reset of the device.
void stand_in_forget_events();

// A graph is captured on a stream, in mode "global", by this thread. The end returns whether it
// is valid: no thread made a call in between that breaks it.
void stand_in_begin_capture(void* stream);
bool stand_in_end_capture();

// Number of calls so far that a recorder must not make: creating contexts, destroying events,
// recording them into a graph, querying them in a thread without their context.
int stand_in_forbidden();
int stand_in_queries();
}
