// NVRTC has no standard library. <cuda.h> asks for this header and needs nothing of it.
#pragma once
