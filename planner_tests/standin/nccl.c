/* NCCL between processes of one machine, through files in a folder that the group's identifier names.

   Compiled against the installed nccl.h, so torch's own ProcessGroupNCCL works on it: communicators, splits of them, groups
   of operations, reductions in the order of ranks. What is not here is the installed NCCL's, which fails without a GPU. */

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST 64

struct ncclComm {
    char folder[192];
    int rank, size, device, aborted, splits;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct transfer *first;
    int listening, receiving;
    unsigned long collectives, sent[MOST], received[MOST];
};
struct transfer { int send, peer; void *at; size_t bytes; ncclComm_t comm; cudaStream_t stream; struct transfer *next; };

void standin_issued(cudaStream_t);
void standin_finished(cudaStream_t);

static __thread int depth, queued;
static __thread struct transfer queue[4096];
static const char *error_text = "";

static size_t width(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        default: return 8;
    }
}
static ncclResult_t put(const char *path, const void *at, size_t bytes) {
    char hidden[520];
    snprintf(hidden, sizeof hidden, "%s.part", path);
    FILE *file = fopen(hidden, "wb");
    if (!file) return ncclSystemError;
    size_t done = fwrite(at, 1, bytes, file);
    if (fclose(file) || done != bytes || rename(hidden, path)) return ncclSystemError;
    return ncclSuccess;
}
static ncclResult_t get(ncclComm_t comm, const char *path, void *at, size_t bytes) {
    FILE *file;
    while (!(file = fopen(path, "rb"))) {
        if (comm->aborted || access(comm->folder, F_OK)) return ncclRemoteError;
        usleep(100);
    }
    size_t done = fread(at, 1, bytes, file), more = (size_t)(fgetc(file) != EOF);
    fclose(file);
    if (done == bytes && !more) return ncclSuccess;
    error_text = "ranks disagree about the size of a message";
    return ncclInvalidArgument;
}
static void name(char *path, ncclComm_t comm, const char *what, unsigned long number, int rank) {
    snprintf(path, 512, "%s/%s-%lu-%d", comm->folder, what, number, rank);
}
/* What a stream does in order, collectives wait for: receives of this communicator. */
static void drained(ncclComm_t comm) {
    pthread_mutex_lock(&comm->lock);
    while (comm->receiving) pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}
/* Every rank's `bytes` in the order of ranks. A file of two meetings ago has been read by all who came to the last. */
static ncclResult_t meet(ncclComm_t comm, const void *mine, size_t bytes, char *all) {
    char path[512];
    drained(comm);
    unsigned long number = comm->collectives++;
    name(path, comm, "all", number, comm->rank);
    if (put(path, mine, bytes)) return ncclSystemError;
    for (int r = 0; r < comm->size; r++) {
        name(path, comm, "all", number, r);
        ncclResult_t told = get(comm, path, all + bytes * (size_t)r, bytes);
        if (told) return told;
    }
    if (number) { name(path, comm, "all", number - 1, comm->rank); unlink(path); }
    return ncclSuccess;
}
static float half_in(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    if (exponent == 0) { float v = (float)fraction / 16777216.0f; return sign ? -v : v; }
    bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (fraction << 13);
    float f; memcpy(&f, &bits, 4); return f;
}
static uint16_t half_out(float f) { _Float16 h = (_Float16)f; uint16_t bits; memcpy(&bits, &h, 2); return bits; }
static double read_at(const char *at, size_t i, ncclDataType_t type) {
    switch (type) {
        case ncclInt8: return ((int8_t *)at)[i];
        case ncclUint8: return ((uint8_t *)at)[i];
        case ncclInt32: return ((int32_t *)at)[i];
        case ncclUint32: return ((uint32_t *)at)[i];
        case ncclInt64: return (double)((int64_t *)at)[i];
        case ncclUint64: return (double)((uint64_t *)at)[i];
        case ncclFloat32: return ((float *)at)[i];
        case ncclFloat64: return ((double *)at)[i];
        case ncclFloat16: return half_in(((uint16_t *)at)[i]);
        default: { uint32_t bits = (uint32_t)((uint16_t *)at)[i] << 16; float f; memcpy(&f, &bits, 4); return f; }
    }
}
static void write_at(char *at, size_t i, ncclDataType_t type, double v) {
    switch (type) {
        case ncclInt8: ((int8_t *)at)[i] = (int8_t)v; break;
        case ncclUint8: ((uint8_t *)at)[i] = (uint8_t)v; break;
        case ncclInt32: ((int32_t *)at)[i] = (int32_t)v; break;
        case ncclUint32: ((uint32_t *)at)[i] = (uint32_t)v; break;
        case ncclInt64: ((int64_t *)at)[i] = (int64_t)v; break;
        case ncclUint64: ((uint64_t *)at)[i] = (uint64_t)v; break;
        case ncclFloat32: ((float *)at)[i] = (float)v; break;
        case ncclFloat64: ((double *)at)[i] = v; break;
        case ncclFloat16: ((uint16_t *)at)[i] = half_out((float)v); break;
        default: { float f = (float)v; uint32_t b; memcpy(&b, &f, 4); ((uint16_t *)at)[i] = (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16); }
    }
}
static ncclResult_t reduced(ncclComm_t comm, const void *mine, void *into, size_t count, size_t first, size_t kept, ncclDataType_t type, ncclRedOp_t op) {
    size_t each = width(type);
    char *all = malloc(each * count * (size_t)comm->size + 1);
    ncclResult_t told = meet(comm, mine, each * count, all);
    if (!told && type == ncclFloat32 && (op == ncclSum || op == ncclAvg)) { /* what nearly all of them are */
        float *out = into, *in = (float *)all + first;
        for (size_t i = 0; i < kept; i++) {
            float v = in[i];
            for (int r = 1; r < comm->size; r++) v += in[count * (size_t)r + i];
            out[i] = op == ncclAvg ? v / (float)comm->size : v;
        }
    } else for (size_t i = 0; !told && i < kept; i++) {
        double v = read_at(all, first + i, type);
        for (int r = 1; r < comm->size; r++) {
            double w = read_at(all + each * count * (size_t)r, first + i, type);
            v = op == ncclMax ? (w > v ? w : v) : op == ncclMin ? (w < v ? w : v) : op == ncclProd ? v * w : v + w;
        }
        write_at(into, i, type, op == ncclAvg ? v / comm->size : v);
    }
    free(all);
    return told;
}

ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : result == ncclRemoteError ? "remote process exited" : "failed"; }
const char *ncclGetLastError(ncclComm_t comm) { (void)comm; return error_text; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    char *where = getenv("STANDIN_NCCL");
    snprintf(id->internal, sizeof id->internal, "%.60s/standin-nccl-XXXXXX", where ? where : "/tmp");
    return mkdtemp(id->internal) ? ncclSuccess : ncclSystemError;
}
static ncclResult_t joined(ncclComm_t *made, const char *folder, int size, int rank) {
    ncclComm_t comm = calloc(1, sizeof *comm);
    snprintf(comm->folder, sizeof comm->folder, "%.180s", folder);
    comm->rank = rank; comm->size = size;
    pthread_mutex_init(&comm->lock, 0);
    pthread_cond_init(&comm->changed, 0);
    cudaGetDevice(&comm->device);
    char all[MOST];
    *made = comm;
    ncclResult_t told = meet(comm, "x", 1, all);
    return told;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    (void)config;
    return size > MOST ? ncclInvalidArgument : joined(comm, id.internal, size, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) { return ncclCommInitRankConfig(comm, size, id, rank, 0); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config) {
    (void)ids;
    return ncclCommInitRankConfig(comm, size, id[0], rank, config);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
    (void)config;
    int mine[2] = {color, key}, all[2 * MOST], size = 0, rank = 0;
    ncclResult_t told = meet(comm, mine, sizeof mine, (char *)all);
    if (told) return told;
    int number = comm->splits++;
    *made = NULL;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    for (int r = 0; r < comm->size; r++)
        if (all[2 * r] == color) { size++; rank += all[2 * r + 1] < key || (all[2 * r + 1] == key && r < comm->rank); }
    char folder[192];
    snprintf(folder, sizeof folder, "%.150s/%d.%x", comm->folder, number, (unsigned)color);
    mkdir(folder, 0700);
    return joined(made, folder, size, rank);
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) { (void)comm; return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { (void)comm; return ncclSuccess; } /* others may still read its files */
ncclResult_t ncclCommAbort(ncclComm_t comm) { comm->aborted = 1; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { (void)comm; *error = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { *count = comm->size; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { *device = comm->device; return ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *at, size_t size, void **handle) { (void)comm; (void)size; *handle = at; return ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) { (void)comm; (void)handle; return ncclSuccess; }

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return reduced(comm, from, to, count, 0, count, type, op);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return reduced(comm, from, to, count, 0, comm->rank == root ? count : 0, type, op);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return reduced(comm, from, to, count * (size_t)comm->size, count * (size_t)comm->rank, count, type, op);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    size_t bytes = count * width(type);
    char *mine = malloc(bytes + 1);
    memcpy(mine, from, bytes); /* it may lie in `to` */
    ncclResult_t told = meet(comm, mine, bytes, to);
    free(mine);
    return told;
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    size_t bytes = count * width(type);
    char *all = malloc(bytes * (size_t)comm->size + 1);
    ncclResult_t told = meet(comm, comm->rank == root ? from : to, bytes, all);
    if (!told) memcpy(to, all + bytes * (size_t)root, bytes);
    free(all);
    return told;
}
ncclResult_t ncclBcast(void *at, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(at, at, count, type, root, comm, stream);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    size_t bytes = count * width(type), whole = bytes * (size_t)comm->size;
    char *all = malloc(whole * (size_t)comm->size + 1);
    ncclResult_t told = meet(comm, from, whole, all);
    for (int r = 0; !told && r < comm->size; r++) memcpy((char *)to + bytes * (size_t)r, all + whole * (size_t)r + bytes * (size_t)comm->rank, bytes);
    free(all);
    return told;
}

/* Sends and receives: those of a group all send before any receives. A receive is the communicator's thread's, and in its
   stream until it is there. */
static ncclResult_t moved(struct transfer *t) {
    char path[512], what[32];
    ncclComm_t comm = t->comm;
    int from = t->send ? comm->rank : t->peer, to = t->send ? t->peer : comm->rank;
    snprintf(what, sizeof what, "from%d", from);
    name(path, comm, what, t->send ? comm->sent[t->peer]++ : comm->received[t->peer]++, to);
    if (t->send) return put(path, t->at, t->bytes);
    ncclResult_t told = get(comm, path, t->at, t->bytes);
    unlink(path);
    return told;
}
static void *listens(void *of) {
    ncclComm_t comm = of;
    for (;;) {
        pthread_mutex_lock(&comm->lock);
        while (!comm->first) pthread_cond_wait(&comm->changed, &comm->lock);
        struct transfer *t = comm->first;
        comm->first = t->next;
        pthread_mutex_unlock(&comm->lock);
        moved(t);
        standin_finished(t->stream);
        free(t);
        pthread_mutex_lock(&comm->lock);
        comm->receiving--;
        pthread_cond_broadcast(&comm->changed);
        pthread_mutex_unlock(&comm->lock);
    }
    return 0;
}
static ncclResult_t begun(struct transfer *t) {
    if (t->send) return moved(t);
    ncclComm_t comm = t->comm;
    struct transfer *kept = malloc(sizeof *kept), **last = &comm->first;
    *kept = *t;
    kept->next = 0;
    standin_issued(t->stream);
    pthread_mutex_lock(&comm->lock);
    while (*last) last = &(*last)->next;
    *last = kept;
    comm->receiving++;
    if (!comm->listening) {
        pthread_t thread;
        comm->listening = 1;
        pthread_create(&thread, 0, listens, comm);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    return ncclSuccess;
}
static ncclResult_t taken(int send, void *at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    struct transfer t = {send, peer, at, count * width(type), comm, stream, 0};
    if (!depth) return begun(&t);
    if (queued == 4096) return ncclInternalError;
    queue[queued++] = t;
    return ncclSuccess;
}
ncclResult_t ncclSend(const void *at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) { return taken(1, (void *)at, count, type, peer, comm, stream); }
ncclResult_t ncclRecv(void *at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) { return taken(0, at, count, type, peer, comm, stream); }
ncclResult_t ncclGroupStart(void) { depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
    if (--depth) return ncclSuccess;
    ncclResult_t told = ncclSuccess;
    for (int send = 1; send >= 0; send--)
        for (int i = 0; i < queued && !told; i++) if (queue[i].send == send) told = begun(&queue[i]);
    queued = 0;
    return told;
}
