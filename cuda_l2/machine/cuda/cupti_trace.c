// Device times of this process's kernels through CUPTI's activity records: started and ended when, in nanoseconds.
// Loaded by cupti.py after libcupti itself, whose functions it finds in the global scope. CUPTI's headers need several
// packages more than its library, so the little used of them is declared here; offsets are those of cupti_activity.h,
// unchanged since CUDA 11 (a newer library's record is only longer).

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BUFFER_BYTES (1 << 20)
#define BUFFER_ALIGNMENT 8
#define KERNEL 3  // CUPTI_ACTIVITY_KIND_KERNEL
#define CONCURRENT_KERNEL 10
#define FLUSH_FORCED 1

typedef struct {
  uint32_t kind, unused0[3];
  uint64_t start, end, completed;
  uint32_t device, context, stream, unused1[10], correlation;
  int64_t grid;
  const char *name;
  uint64_t unused2[4];
  uint64_t graph_node;
  uint32_t unused3, graph;
} kernel_record_t;  // the first part of CUpti_ActivityKernel10

_Static_assert(offsetof(kernel_record_t, start) == 16, "start");
_Static_assert(offsetof(kernel_record_t, stream) == 48, "stream");
_Static_assert(offsetof(kernel_record_t, correlation) == 92, "correlation");
_Static_assert(offsetof(kernel_record_t, name) == 104, "name");
_Static_assert(offsetof(kernel_record_t, graph_node) == 144, "graph node");
_Static_assert(offsetof(kernel_record_t, graph) == 156, "graph");

typedef void (*request_fn)(uint8_t **buffer, size_t *size, size_t *most_records);
typedef void (*complete_fn)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);
int cuptiActivityRegisterCallbacks(request_fn, complete_fn);
int cuptiActivityEnable(int kind);
int cuptiActivityDisable(int kind);
int cuptiActivityFlushAll(uint32_t flag);
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, kernel_record_t **record);
int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped);
int cuptiFinalize(void);
int cuptiGetResultString(int result, const char **text);

typedef struct {
  uint64_t start_ns, end_ns;  // 0 where the device gave no time
  uint64_t graph_node;
  uint32_t correlation, graph, stream, device;
  const char *name;
} span_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static span_t *spans;
static size_t count, capacity;
static uint64_t lost;
static char **names;
static size_t name_count, name_capacity;

// A copy that outlives the record; kernels are few, so a list does.
static const char *kept(const char *name) {
  if (!name) return "";
  for (size_t i = name_count; i-- > 0;)
    if (!strcmp(names[i], name)) return names[i];
  if (name_count == name_capacity) {
    size_t larger = name_capacity ? 2 * name_capacity : 64;
    char **grown = realloc(names, larger * sizeof *names);
    if (!grown) return "";
    names = grown;
    name_capacity = larger;
  }
  char *copy = strdup(name);
  if (!copy) return "";
  return names[name_count++] = copy;
}

static void add(const kernel_record_t *kernel) {
  if (count == capacity) {
    size_t larger = capacity ? 2 * capacity : 4096;
    span_t *grown = realloc(spans, larger * sizeof *spans);
    if (!grown) {
      lost++;
      return;
    }
    spans = grown;
    capacity = larger;
  }
  span_t *span = &spans[count++];
  span->start_ns = kernel->start;
  span->end_ns = kernel->end;
  span->graph_node = kernel->graph_node;
  span->correlation = kernel->correlation;
  span->graph = kernel->graph;
  span->stream = kernel->stream;
  span->device = kernel->device;
  span->name = kept(kernel->name);
}

static void request(uint8_t **buffer, size_t *size, size_t *most_records) {
  *most_records = 0;
  *buffer = aligned_alloc(BUFFER_ALIGNMENT, BUFFER_BYTES);
  *size = *buffer ? BUFFER_BYTES : 0;
}

static void complete(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)size;
  kernel_record_t *record = NULL;
  pthread_mutex_lock(&lock);
  while (valid && cuptiActivityGetNextRecord(buffer, valid, &record) == 0)
    if (record->kind == CONCURRENT_KERNEL || record->kind == KERNEL) add(record);
  size_t dropped = 0;
  if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == 0) lost += dropped;
  pthread_mutex_unlock(&lock);
  free(buffer);
}

// Each of these answers CUPTI's status, 0 for success.

static int registered;

int trace_start(void) {
  if (!registered) {
    int status = cuptiActivityRegisterCallbacks(request, complete);
    if (status) return status;
    registered = 1;
  }
  return cuptiActivityEnable(CONCURRENT_KERNEL);
}

int trace_stop(void) { return cuptiActivityDisable(CONCURRENT_KERNEL); }

// Takes CUPTI out of the process; the next start puts it back.
int trace_detach(void) {
  registered = 0;
  return cuptiFinalize();
}

// Hands over what has ended; the caller has waited for the device.
int trace_flush(void) { return cuptiActivityFlushAll(FLUSH_FORCED); }

// Moves the spans collected so far to `out` (all, or none where it has no room) and answers how many there are.
size_t trace_take(span_t *out, size_t room, uint64_t *dropped) {
  pthread_mutex_lock(&lock);
  size_t found = count;
  *dropped = lost;
  if (found <= room) {
    if (found) memcpy(out, spans, found * sizeof *out);
    count = lost = 0;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

const char *trace_error(int status) {
  const char *text = NULL;
  return cuptiGetResultString(status, &text) == 0 && text ? text : "unknown";
}
