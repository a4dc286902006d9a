// NVRTC has no standard library; libcu++ defines these names in the global namespace for it.
#pragma once
#include <cuda/std/cstdint>
