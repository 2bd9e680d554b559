/* nccl.h includes the runtime's header for C++; what C needs of it is the interface. */
#include <cuda_runtime_api.h>
