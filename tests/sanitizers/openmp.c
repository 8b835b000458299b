/* The part of libgomp that the kernels use, on pthreads: ThreadSanitizer knows those, and sees every wait of a thread.

   Compiled into the library instead of libgomp (HEADWATER_CFLAGS names this file). Threads are made anew for every
   parallel region. A region that does not say how many threads it wants has SANITIZER_THREADS of them. */

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#define HIDDEN __attribute__((visibility("hidden")))     /* torch's own libgomp is loaded as well, and stays torch's */

typedef struct {
    void (*run)(void *);
    void *data;
    unsigned threads;
    pthread_barrier_t barrier;
    pthread_mutex_t lock;
    long next, end, step, chunk;                         /* of the loop that the threads share at the moment */
    bool open;
} Team;
typedef struct { Team *team; unsigned number; } Member;

static __thread Member me;

HIDDEN int omp_get_thread_num(void) { return (int)me.number; }
HIDDEN int omp_get_num_threads(void) { return me.team ? (int)me.team->threads : 1; }
HIDDEN void GOMP_barrier(void) { if (me.team) pthread_barrier_wait(&me.team->barrier); }

static void *member(void *given) {
    me = *(Member *)given;
    me.team->run(me.team->data);
    return NULL;
}

HIDDEN void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags) {
    const char *wanted = getenv("SANITIZER_THREADS");
    (void)flags;
    if (!threads) threads = wanted ? (unsigned)atoi(wanted) : 3;
    Team team = {.run = run, .data = data, .threads = threads};
    Member members[threads], before = me;
    pthread_t thread[threads];
    pthread_barrier_init(&team.barrier, NULL, threads);
    pthread_mutex_init(&team.lock, NULL);
    for (unsigned i = 0; i < threads; i++) members[i] = (Member){&team, i};
    for (unsigned i = 1; i < threads; i++) if (pthread_create(thread + i, NULL, member, members + i)) abort();
    member(members);
    for (unsigned i = 1; i < threads; i++) pthread_join(thread[i], NULL);
    me = before;
    pthread_mutex_destroy(&team.lock);
    pthread_barrier_destroy(&team.barrier);
}

HIDDEN bool GOMP_loop_nonmonotonic_dynamic_next(long *from, long *to) {
    Team *t = me.team;
    pthread_mutex_lock(&t->lock);
    bool left = t->next < t->end;
    if (left) {
        *from = t->next;
        *to = t->next + t->chunk * t->step < t->end ? t->next + t->chunk * t->step : t->end;
        t->next = *to;
    }
    pthread_mutex_unlock(&t->lock);
    return left;
}

HIDDEN bool GOMP_loop_nonmonotonic_dynamic_start(long begin, long end, long step, long chunk, long *from, long *to) {
    Team *t = me.team;
    pthread_mutex_lock(&t->lock);
    if (!t->open) t->next = begin, t->end = end, t->step = step, t->chunk = chunk, t->open = true;
    pthread_mutex_unlock(&t->lock);
    return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

HIDDEN void GOMP_loop_end(void) {
    GOMP_barrier();
    if (!me.number) me.team->open = false;
    GOMP_barrier();
}
