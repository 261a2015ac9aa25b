/* How long launches take on the device, learned per kernel and grid, per graph, or per size of a copy. */
#include "gate.h"

enum { PLACES = 4096, PROBES = 4, SHORT_NS = 200000, DOUBTS = 3 };

static struct length {
    uint64_t key, ns, doubts;
} lengths[PLACES];

static struct length *find(uint64_t key)
{
    for (unsigned i = 0; i < PROBES; i++) {
        struct length *length = &lengths[((key * 0x9e3779b97f4a7c15u >> 40) + i) % PLACES];
        if (length->key == key)
            return length;
    }
    return NULL;
}

uint64_t aim_length_of(uint64_t key)
{
    const struct length *length = find(key);
    return length == NULL ? 0 : length->ns;
}

/* A free place, or the place of another kernel: that one is measured again. */
static struct length *place(uint64_t key)
{
    struct length *length = find(key);
    for (unsigned i = 0; length == NULL && i < PROBES; i++) {
        struct length *other = &lengths[((key * 0x9e3779b97f4a7c15u >> 40) + i) % PLACES];
        if (other->ns == 0 || i == PROBES - 1)
            length = other;
    }
    if (length->key != key) {
        length->key = key;
        length->ns = length->doubts = 0;
    }
    return length;
}

/* A launch alone between two events. `call_ns`: how long the driver's call took. The first launch of a kernel may load it, and
 * the events then enclose the time of loading; such a measurement is repeated, a few times at most. */
void aim_length_measured(uint64_t key, uint64_t measured, uint64_t call_ns)
{
    struct length *length = place(key);
    if (length->ns != 0)
        aim_length_scaled(key, measured, length->ns);
    else if (measured < SHORT_NS || call_ns * 4 <= measured || ++length->doubts >= DOUBTS)
        length->ns = measured == 0 ? 1 : measured;
}

/* Measured beside another tenant's work: the events enclose its turns too, so a known length can only become shorter. */
void aim_length_beside(uint64_t key, uint64_t measured, uint64_t expected, uint64_t call_ns)
{
    const struct length *length = find(key);
    if (length == NULL || length->ns == 0)
        aim_length_measured(key, measured, call_ns);
    else if (measured < expected)
        aim_length_scaled(key, measured, expected);
}

/* After a batch took `measured` instead of `expected`. A launch that others ran beside takes longer than it needs, so a longer
 * time is trusted slowly. */
void aim_length_scaled(uint64_t key, uint64_t measured, uint64_t expected)
{
    struct length *length = find(key);
    if (length == NULL || length->ns == 0 || expected == 0)
        return;
    uint64_t old = length->ns;
    if (measured > expected + expected / 8)
        length->ns = old + old / 8 + 1;
    else
        length->ns = (3 * old + (uint64_t)((double)old * ((double)measured / (double)expected))) / 4;
    if (length->ns == 0)
        length->ns = 1;
}
