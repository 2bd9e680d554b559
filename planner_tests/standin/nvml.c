/* NVIDIA's management library over the same devices, loaded under its name: torch and pynvml find it by themselves.

   What it says is read from the environment at every question: STANDIN_REASONS (bits of why clocks are held back),
   STANDIN_OTHERS ("pid:bytes,..." on device 0), STANDIN_MIG (each device is one instance, MIG-..., whose handle is not
   asked for clocks, energy and utilisation), STANDIN_ECC_ERRORS, STANDIN_NVLINK, STANDIN_NVML_ERROR
   (3: not supported, 4: no permission, 15: the GPU was lost). Energy counts 100 W. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int result;
enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
struct memory { unsigned long long total, unused, used; };
struct rates { unsigned int gpu, memory; };
struct process { unsigned int pid; unsigned long long bytes; unsigned int instance, part; };

static unsigned long long number(const char *name, unsigned long long otherwise) { char *text = getenv(name); return text && *text ? strtoull(text, 0, 0) : otherwise; }
#define PART 0x1000 /* in the handle of an instance of MIG */
static int index_of(void *device) { return (int)((long)device & ~PART) - 1; }
static int part(void *device) { return ((long)device & PART) != 0; }
static int known(void *device) { return device && index_of(device) < (int)number("STANDIN_GPUS", 1); }
/* What every question about what a device does is answered with: STANDIN_NVML_ERROR, or that there is no such device. */
static result wrong(void) { return (result)number("STANDIN_NVML_ERROR", INVALID); }
static int silent(void *device) { return !known(device) || number("STANDIN_NVML_ERROR", 0); }
static int unmeasured(void *device) { return silent(device) || part(device); } /* what only whole cards tell */

result nvmlInit(void) { return SUCCESS; }
result nvmlInit_v2(void) { return SUCCESS; }
result nvmlInitWithFlags(unsigned int flags) { (void)flags; return SUCCESS; }
result nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(result what) { return what == NOT_SUPPORTED ? "Not Supported" : what == SUCCESS ? "Success" : "Invalid Argument"; }
result nvmlSystemGetDriverVersion(char *text, unsigned int size) { snprintf(text, size, "999.0 stand-in"); return SUCCESS; }
result nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13020; return SUCCESS; }
result nvmlDeviceGetCount_v2(unsigned int *count) { *count = (unsigned int)number("STANDIN_GPUS", 1); return SUCCESS; }
result nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (index >= number("STANDIN_GPUS", 1)) return INVALID;
    *device = (void *)(long)(index + 1);
    return SUCCESS;
}
/* As torch spells the identifier of a device whose first byte is its index. */
result nvmlDeviceGetUUID(void *device, char *text, unsigned int size) {
    if (!known(device)) return INVALID;
    snprintf(text, size, "GPU-%02x000000-0000-0000-0000-000000000000", index_of(device));
    return SUCCESS;
}
result nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    unsigned int index, instance = 0;
    int mig = strncmp(uuid, "MIG-", 4) == 0;
    if ((!mig && strncmp(uuid, "GPU-", 4)) || sscanf(uuid + 4, "%2x%2x", &index, &instance) < 1) return NOT_FOUND;
    if (mig != (int)instance || mig > (int)number("STANDIN_MIG", 0)) return NOT_FOUND;
    result found = nvmlDeviceGetHandleByIndex_v2(index, device);
    if (!found && mig) *device = (void *)((long)*device | PART);
    return found;
}
result nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **whole) {
    if (!known(device) || !part(device)) return INVALID;
    *whole = (void *)((long)device & ~PART);
    return SUCCESS;
}
result nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    unsigned int index;
    if (sscanf(bus, "%*x:%x:", &index) != 1 || !index) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(index - 1, device);
}
result nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned int link, int *type) { (void)device; (void)link; (void)type; return NOT_SUPPORTED; }
result nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned int link, void *info) { (void)device; (void)link; (void)info; return NOT_SUPPORTED; }
result nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *found) { (void)device; (void)found; *count = 0; return SUCCESS; }
result nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { (void)device; (void)info; return NOT_SUPPORTED; }
result nvmlDeviceGetName(void *device, char *text, unsigned int size) {
    if (!known(device)) return INVALID;
    char *names = getenv("STANDIN_NAME"), *name = names ? names : "Stand-In GPU", *rest;
    for (int i = 0; i < index_of(device) && (rest = strchr(name, '|')); i++) name = rest + 1;
    snprintf(text, size, "%.*s%s", (int)strcspn(name, "|"), name, part(device) ? " MIG 1g.10gb" : "");
    return SUCCESS;
}
result nvmlDeviceGetMemoryInfo(void *device, struct memory *found) {
    if (silent(device)) return wrong();
    found->total = number("STANDIN_MEMORY", 4ull << 30); found->used = found->total / 4; found->unused = found->total - found->used;
    return SUCCESS;
}
result nvmlDeviceGetUtilizationRates(void *device, struct rates *found) {
    if (unmeasured(device)) return wrong();
    if (number("STANDIN_MIG", 0)) return NOT_SUPPORTED; /* the whole card does not tell it either */
    found->gpu = 75; found->memory = 40;
    return SUCCESS;
}
result nvmlDeviceGetClockInfo(void *device, int type, unsigned int *mhz) { if (unmeasured(device)) return wrong(); *mhz = type == 2 ? 1593 : (unsigned int)number("STANDIN_CLOCK", 1410); return SUCCESS; }
result nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned int *mhz) { if (unmeasured(device)) return wrong(); *mhz = type == 2 ? 1593 : 1410; return SUCCESS; }
result nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *bits) { if (unmeasured(device)) return wrong(); *bits = number("STANDIN_REASONS", 0); return SUCCESS; }
result nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) { return nvmlDeviceGetCurrentClocksEventReasons(device, bits); }
result nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    if (unmeasured(device)) return wrong();
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *millijoules = (unsigned long long)((double)t.tv_sec * 1e5 + (double)t.tv_nsec / 1e4);
    return SUCCESS;
}
result nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) { if (unmeasured(device)) return wrong(); *milliwatts = 100000; return SUCCESS; }
result nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *milliwatts) { if (unmeasured(device)) return wrong(); *milliwatts = 400000; return SUCCESS; }
result nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *degrees) { (void)sensor; if (silent(device)) return wrong(); *degrees = 50; return SUCCESS; }
result nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, struct process *found) {
    if (silent(device)) return wrong();
    char text[1024] = "";
    char *others = getenv("STANDIN_OTHERS");
    if (others && index_of(device) == 0) snprintf(text, sizeof text, "%s", others);
    unsigned int most = found ? *count : 0, n = 0;
    struct process own = {(unsigned int)getpid(), 1 << 20, 0xffffffff, 0xffffffff};
    if (n < most) found[n] = own;
    n++;
    char *rest = text, *one;
    while ((one = strsep(&rest, ","))) {
        struct process p = {0, 0, 0xffffffff, 0xffffffff};
        if (sscanf(one, "%u:%llu", &p.pid, &p.bytes) != 2) continue;
        if (n < most) found[n] = p;
        n++;
    }
    *count = n;
    return n > most ? TOO_SMALL : SUCCESS;
}
result nvmlDeviceGetMigMode(void *device, unsigned int *now, unsigned int *pending) { if (silent(device)) return wrong(); *now = *pending = (unsigned int)number("STANDIN_MIG", 0); return SUCCESS; }
result nvmlDeviceGetEccMode(void *device, int *now, int *pending) { if (silent(device)) return wrong(); *now = *pending = 1; return SUCCESS; }
result nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count) { (void)type; (void)counter; if (silent(device)) return wrong(); *count = number("STANDIN_ECC_ERRORS", 0); return SUCCESS; }
result nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) { if (!known(a) || !known(b)) return INVALID; *status = what == 2 && number("STANDIN_NVLINK", 0) ? 0 : 5; return SUCCESS; }
result nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) { if (!known(a) || !known(b)) return INVALID; *level = 30; return SUCCESS; }
result nvmlDeviceGetNvLinkState(void *device, unsigned int link, int *active) { if (!known(device) || link >= number("STANDIN_NVLINK", 0)) return INVALID; *active = 1; return SUCCESS; }
result nvmlDeviceGetNvLinkVersion(void *device, unsigned int link, unsigned int *version) { if (!known(device) || link >= number("STANDIN_NVLINK", 0)) return INVALID; *version = 4; return SUCCESS; }
