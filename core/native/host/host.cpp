// Host work of steps and of the scheduler in compiled code: each noun has a header, which binds itself.

#include <pybind11/pybind11.h>

#include "draws.h"
#include "peaks.h"
#include "relay.h"
#include "suffix_drafter.h"
#include "trial.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  slipstream_host::bind_relay(module);
  slipstream_host::bind_peaks(module);
  slipstream_host::bind_draws(module);
  slipstream_host::bind_suffix_drafter(module);
  slipstream_host::bind_trial(module);
}
