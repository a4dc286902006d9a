// Makes the view of a sandbox from inside its new namespaces and runs a command there: see sandbox.py, whose script does
// the same by forty programs where nothing compiles this one.
//
//     namespaces ROOT WORK READS DEVICES PROC MOST COMMAND...
//
// READS and DEVICES are paths, one a line; PROC is empty where no /proc is left; MOST is a number of tasks, or empty.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

static void require(int right, const char *what, const char *path) {
    if (right) return;
    dprintf(2, "sandbox: %s %s: %s\n", what, path, strerror(errno));
    _exit(1);
}

static char *under(const char *root, const char *path) {
    size_t size = strlen(root) + strlen(path) + 1;
    char *joined = malloc(size);
    require(joined != NULL, "no memory for", path);
    snprintf(joined, size, "%s%s", root, path);
    return joined;
}

// A folder and those above it. of: how many of the last parts are left out.
static void make_folders(const char *path, int of) {
    char *part = under("", path);
    for (char *last; of && (last = strrchr(part, '/')); of--) *last = 0;
    for (char *end = part; end;) {
        end = strchr(end + 1, '/');
        if (end) *end = 0;
        require(!mkdir(part, 0755) || errno == EEXIST, "cannot make", part);
        if (end) *end = '/';
    }
    free(part);
}

static void bind_to(const char *from, const char *to, unsigned long how) {
    require(!mount(from, to, NULL, MS_BIND | how, NULL), "cannot bind", to);
}

// What else the mount forbids stays: the kernel refuses to take it back.
static void make_read_only(const char *path) {
    struct statvfs now;
    require(!statvfs(path, &now), "cannot look at", path);
    unsigned long kept = now.f_flag & (ST_NOSUID | ST_NODEV | ST_NOEXEC | ST_NOATIME | ST_NODIRATIME);
    if (now.f_flag & ST_RELATIME) kept |= MS_RELATIME;
    require(!mount(NULL, path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, NULL), "cannot protect", path);
}

static void give_read(const char *root, const char *path) {
    struct stat found;
    if (lstat(path, &found)) return;
    char *to = under(root, path);
    if (S_ISLNK(found.st_mode)) {
        char target[PATH_MAX] = "";
        require(readlink(path, target, sizeof target - 1) > 0, "cannot read", path);
        make_folders(to, 1);
        require(!symlink(target, to) || errno == EEXIST, "cannot link", to);
    } else if (S_ISDIR(found.st_mode)) {
        make_folders(to, 0);
        bind_to(path, to, MS_REC);
        make_read_only(to);
    }
    free(to);
}

static void give_device(const char *root, const char *path) {
    char *to = under(root, path);
    make_folders(to, 1);
    int made = open(to, O_WRONLY | O_CREAT, 0644);
    require(made >= 0, "cannot make", to);
    close(made);
    bind_to(path, to, 0);
    free(to);
}

static void each_line(char *lines, const char *root, void (*give)(const char *, const char *)) {
    for (char *path; (path = strsep(&lines, "\n"));)
        if (*path) give(root, path);
}

// The limit of a namespace's tasks, which nobody inside changes.
static void limit_tasks(const char *root, const char *most) {
    char *limit = under(root, "/proc/sys/kernel/pid_max");
    int file = *most ? open(limit, O_WRONLY) : -1;
    if (file >= 0 && write(file, most, strlen(most)) > 0) {
        bind_to(limit, limit, 0);
        make_read_only(limit);
    }
    if (file >= 0) close(file);
    free(limit);
}

// With CAP_SYS_ADMIN the command could mount the folders writable again.
static void give_up_capabilities(void) {
    for (int number = 0; prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0; number++)
        require(!prctl(PR_CAPBSET_DROP, number, 0, 0, 0), "cannot give up", "a capability");
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    require(!syscall(SYS_capget, &header, data), "cannot read", "capabilities");
    data[0].inheritable = data[1].inheritable = 0;
    require(!syscall(SYS_capset, &header, data), "cannot give up", "capabilities");
    require(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "cannot forbid", "new privileges");
}

int main(int count, char **given) {
    errno = EINVAL;
    require(count > 7, "needs", "seven arguments");
    const char *root = given[1], *work = given[2], *proc = given[5], *most = given[6];
    require(!mount("tmpfs", root, "tmpfs", 0, "size=16m,mode=755"), "cannot mount", root);
    each_line(given[3], root, give_read);
    char *own = under(root, work), *temporary = under(root, "/tmp"), *processes = under(root, "/proc");
    make_folders(temporary, 0);
    make_folders(own, 0);
    give_device(root, "/dev/null");
    give_device(root, "/dev/urandom");
    each_line(given[4], root, give_device);
    bind_to(work, own, 0);
    char *old = under(root, "/.old");
    make_folders(old, 0);
    make_folders(processes, 0);
    require(!mount("proc", processes, "proc", 0, NULL), "cannot mount", processes);
    limit_tasks(root, most);
    require(!chdir(root) && !syscall(SYS_pivot_root, ".", ".old") && !chdir("/"), "cannot move to", root);
    require(!umount2("/.old", MNT_DETACH), "cannot leave", "the old root");
    require(*proc || !umount2("/proc", MNT_DETACH), "cannot leave", "/proc");
    require(!chdir(work), "cannot go to", work);
    give_up_capabilities();
    execvp(given[7], given + 7);
    require(0, "cannot run", given[7]);
}
