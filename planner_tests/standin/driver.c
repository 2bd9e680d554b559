/* The little of the CUDA driver that torch asks for when it starts; every other function of it says that it cannot. */

#include <cuda.h>
#include <string.h>

static int context;

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) { (void)device; *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *at, CUdevice device) { (void)device; *at = (CUcontext)&context; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *at) { *at = (CUcontext)&context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext at) { (void)at; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { (void)error; *text = "the stand-in runs no kernels"; return CUDA_SUCCESS; }

CUresult standin_refused(void) { return CUDA_ERROR_NOT_SUPPORTED; }
/* A name that the header does not declare does not compile. */
#define REFUSED(name) _Static_assert(sizeof(&name), #name); __asm__(".globl " #name "\n" #name " = standin_refused")
REFUSED(cuDeviceGetAttribute);
REFUSED(cuFuncGetAttribute);
REFUSED(cuFuncSetAttribute);
REFUSED(cuFuncSetCacheConfig);
REFUSED(cuLaunchCooperativeKernel);
REFUSED(cuLaunchKernel);
REFUSED(cuLinkAddData_v2);
REFUSED(cuLinkComplete);
REFUSED(cuLinkCreate_v2);
REFUSED(cuModuleGetFunction);
REFUSED(cuModuleLoad);
REFUSED(cuModuleLoadData);
REFUSED(cuModuleLoadDataEx);
REFUSED(cuModuleUnload);
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor);
REFUSED(cuPointerGetAttribute);
REFUSED(cuTensorMapEncodeTiled);
