/* The words of NVIDIA's compiler that its runtime's headers use and no other compiler knows; they mean nothing here. */
#ifndef STANDIN_HOST_DEFINES
#define STANDIN_HOST_DEFINES
#define __host__
#define __device__
#define __global__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __dv(v)
#endif
