/* What this process holds: one hash table per kind, under one mutex. */
#include "aim.h"

#include <stdlib.h>
#include <string.h>

struct aim_taken {
    struct aim_taken *next;
    struct aim_entry entry;
};

static struct {
    struct aim_taken **buckets;
    size_t size, count;
} tables[K_KINDS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static size_t place(uint64_t key, size_t size) { return (size_t)((key * 0x9e3779b97f4a7c15u) >> 20) & (size - 1); }

static int grow(enum aim_kind kind)
{
    size_t old = tables[kind].size, size = old == 0 ? 256 : old * 2;
    struct aim_taken **buckets = calloc(size, sizeof *buckets);
    if (buckets == NULL)
        return old != 0;
    for (size_t i = 0; i < old; i++)
        for (struct aim_taken *node = tables[kind].buckets[i], *next; node != NULL; node = next) {
            next = node->next;
            struct aim_taken **at = &buckets[place(node->entry.key, size)];
            node->next = *at;
            *at = node;
        }
    free(tables[kind].buckets);
    tables[kind].buckets = buckets;
    tables[kind].size = size;
    return 1;
}

static struct aim_taken **find(enum aim_kind kind, uint64_t key)
{
    if (tables[kind].size == 0)
        return NULL;
    struct aim_taken **at = &tables[kind].buckets[place(key, tables[kind].size)];
    while (*at != NULL && (*at)->entry.key != key)
        at = &(*at)->next;
    return *at == NULL ? NULL : at;
}

static int put(const struct aim_entry *entry)
{
    struct aim_taken **at = find(entry->kind, entry->key);
    if (at != NULL) {
        (*at)->entry = *entry;
        return 1;
    }
    if (tables[entry->kind].count >= tables[entry->kind].size && !grow(entry->kind))
        return 0;
    struct aim_taken *node = malloc(sizeof *node);
    if (node == NULL)
        return 0;
    at = &tables[entry->kind].buckets[place(entry->key, tables[entry->kind].size)];
    node->entry = *entry;
    node->next = *at;
    *at = node;
    tables[entry->kind].count++;
    return 1;
}

int aim_allocation_put(const struct aim_entry *entry)
{
    pthread_mutex_lock(&mutex);
    int done = put(entry);
    pthread_mutex_unlock(&mutex);
    return done;
}

static void unlink_node(enum aim_kind kind, struct aim_taken **at)
{
    struct aim_taken *node = *at;
    *at = node->next;
    tables[kind].count--;
    free(node);
}

int aim_allocation_take(enum aim_kind kind, uint64_t key, struct aim_entry *entry)
{
    pthread_mutex_lock(&mutex);
    struct aim_taken **at = find(kind, key);
    if (at != NULL) {
        *entry = (*at)->entry;
        unlink_node(kind, at);
    }
    pthread_mutex_unlock(&mutex);
    return at != NULL;
}

int aim_allocation_get(enum aim_kind kind, uint64_t key, struct aim_entry *entry)
{
    pthread_mutex_lock(&mutex);
    struct aim_taken **at = find(kind, key);
    if (at != NULL)
        *entry = (*at)->entry;
    pthread_mutex_unlock(&mutex);
    return at != NULL;
}

/* Takes out the entries of a device, and returns their bytes. */
uint64_t aim_allocations_take_all(int device, unsigned kinds)
{
    uint64_t bytes = 0;
    pthread_mutex_lock(&mutex);
    for (unsigned kind = 0; kind < K_KINDS; kind++)
        for (size_t i = 0; (kinds & 1u << kind) && i < tables[kind].size; i++)
            for (struct aim_taken **at = &tables[kind].buckets[i]; *at != NULL;) {
                if ((*at)->entry.device != device) {
                    at = &(*at)->next;
                    continue;
                }
                bytes += (*at)->entry.bytes;
                unlink_node((enum aim_kind)kind, at);
            }
    pthread_mutex_unlock(&mutex);
    return bytes;
}

/* The entries of a context. */
struct aim_taken *aim_allocations_take_out(uint64_t context, unsigned kinds)
{
    struct aim_taken *taken = NULL;
    pthread_mutex_lock(&mutex);
    for (unsigned kind = 0; kind < K_KINDS; kind++)
        for (size_t i = 0; (kinds & 1u << kind) && i < tables[kind].size; i++)
            for (struct aim_taken **at = &tables[kind].buckets[i], *node; (node = *at) != NULL;) {
                if (node->entry.context != context) {
                    at = &node->next;
                    continue;
                }
                *at = node->next;
                tables[kind].count--;
                node->next = taken;
                taken = node;
            }
    pthread_mutex_unlock(&mutex);
    return taken;
}

void aim_taken_put_back(struct aim_taken *taken)
{
    for (struct aim_taken *next; taken != NULL; taken = next) {
        next = taken->next;
        aim_allocation_put(&taken->entry);
        free(taken);
    }
}

void aim_taken_give_back(struct aim_taken *taken)
{
    for (struct aim_taken *next; taken != NULL; taken = next) {
        next = taken->next;
        aim_give_back(taken->entry.device, taken->entry.bytes);
        free(taken);
    }
}

/* The entry with the smallest key above `after`; device -1 means any. */
int aim_allocation_next(enum aim_kind kind, int device, uint64_t after, struct aim_entry *entry)
{
    int found = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < tables[kind].size; i++)
        for (struct aim_taken *node = tables[kind].buckets[i]; node != NULL; node = node->next)
            if (node->entry.key > after && (device < 0 || node->entry.device == device) &&
                (!found || node->entry.key < entry->key)) {
                *entry = node->entry;
                found = 1;
            }
    pthread_mutex_unlock(&mutex);
    return found;
}

/* Entries that refer to `other` refer to `to` from now on, or are taken out. */
void aim_allocations_repoint(enum aim_kind kind, uint64_t of, uint64_t to)
{
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < tables[kind].size; i++)
        for (struct aim_taken **at = &tables[kind].buckets[i]; *at != NULL;) {
            if ((*at)->entry.of == of && to == 0) {
                unlink_node(kind, at);
                continue;
            }
            if ((*at)->entry.of == of)
                (*at)->entry.of = to;
            at = &(*at)->next;
        }
    pthread_mutex_unlock(&mutex);
}

/* The parent's thread may have been in the middle of a change: nothing is read or freed. */
void aim_allocations_forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    memset(tables, 0, sizeof tables);
}
