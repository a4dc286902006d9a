// NVRTC has no standard library; libcu++ defines these macros for it.
#pragma once
#include <cuda/std/climits>
