/* Loaded by LD_PRELOAD and armed by ctypes: one call that changes a file below a folder fails, or is the process's last.

   Calls are noted in memory that forked processes share: their number, then one letter for each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { GO_ON, FAIL, HALF };
static struct { long calls; char kinds[8192]; } *noted;
static char below[4096];
static long at;
static char how; /* k: killed before it, t: within it, e: it fails with EIO, E: so do all later ones, s: no space from it on */

void arm(void *memory, const char *folder, long number, char what) {
    strncpy(below, folder, sizeof below - 1);
    at = number, how = what, noted = memory;
}

static int reached(int folder, const char *path, char kind) {
    char full[8192] = "", link[64];
    if (!noted) return GO_ON;
    if (!path || (path[0] != '/' && folder != AT_FDCWD)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        if (readlink(link, full, 4096) < 0) return GO_ON;
    }
    if (path && path[0] == '/') *full = 0;
    if (path) strcat(strcat(full, "/"), path);
    char *start = full[0] == '/' && full[1] == '/' ? full + 1 : full;
    if (strncmp(start, below, strlen(below))) return GO_ON;
    long now = __sync_add_and_fetch(&noted->calls, 1);
    if (now <= (long)sizeof noted->kinds) noted->kinds[now - 1] = kind;
    if (now == at && how == 't' && kind == 'w') return HALF;
    if (now == at && strchr("kt", how)) kill(0, SIGKILL);
    if (now == at && how == 's' && kind == 'w') return HALF;
    int fails = how == 's' ? now >= at && strchr("wtfo", kind) : (now == at && how == 'e') || (now >= at && how == 'E');
    if (fails) errno = how == 's' ? ENOSPC : EIO;
    return fails ? FAIL : GO_ON;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES(name, parameters, fd, whole, half)                                                                      \
    ssize_t name parameters {                                                                                          \
        int found = reached(fd, NULL, 'w');                                                                            \
        if (found == FAIL) return -1;                                                                                  \
        ssize_t written = found == HALF ? REAL(name) half : REAL(name) whole;                                          \
        if (found == HALF && how == 't') kill(0, SIGKILL);                                                             \
        return written;                                                                                                \
    }
#define CALL(name, parameters, folder, path, kind, words)                                                              \
    int name parameters { return reached(folder, path, kind) ? -1 : REAL(name) words; }

WRITES(write, (int fd, const void *data, size_t n), fd, (fd, data, n), (fd, data, n / 2))
WRITES(pwrite, (int fd, const void *data, size_t n, off_t to), fd, (fd, data, n, to), (fd, data, n / 2, to))
WRITES(pwrite64, (int fd, const void *data, size_t n, off64_t to), fd, (fd, data, n, to), (fd, data, n / 2, to))
WRITES(writev, (int fd, const struct iovec *v, int n), fd, (fd, v, n), (fd, v, n / 2))
WRITES(sendfile, (int fd, int in, off_t *from, size_t n), fd, (fd, in, from, n), (fd, in, from, n / 2))
WRITES(sendfile64, (int fd, int in, off64_t *from, size_t n), fd, (fd, in, from, n), (fd, in, from, n / 2))
CALL(ftruncate, (int fd, off_t size), fd, NULL, 't', (fd, size))
CALL(ftruncate64, (int fd, off64_t size), fd, NULL, 't', (fd, size))
CALL(fsync, (int fd), fd, NULL, 'f', (fd))
CALL(fdatasync, (int fd), fd, NULL, 'f', (fd))
CALL(fchmod, (int fd, mode_t mode), fd, NULL, 'm', (fd, mode))
CALL(rename, (const char *from, const char *to), AT_FDCWD, to, 'r', (from, to))
CALL(renameat, (int a, const char *from, int b, const char *to), b, to, 'r', (a, from, b, to))
CALL(unlink, (const char *path), AT_FDCWD, path, 'u', (path))
CALL(unlinkat, (int folder, const char *path, int flags), folder, path, 'u', (folder, path, flags))
CALL(rmdir, (const char *path), AT_FDCWD, path, 'u', (path))
CALL(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, 'o', (path, mode))

#define OPENS(name, parameters, folder, words)                                                                         \
    int name parameters {                                                                                              \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                                                      \
        va_end(rest);                                                                                                  \
        return flags & (O_CREAT | O_TRUNC) && reached(folder, path, 'o') ? -1 : REAL(name) words;                      \
    }
OPENS(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENS(openat, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
OPENS(openat64, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
