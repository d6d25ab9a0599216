#!/bin/sh
# cell.sh ROOT FOLDER [PATH...] -- COMMAND...: run a command that is not trusted where there is little to see.
#
# `unshare` starts this as the first process of new namespaces: its processes, its network, its mounts, its users. Here the
# view of the disk is built at ROOT, an empty folder: what a Python needs and each PATH, read-only; FOLDER, of which only
# FOLDER/tmp can be written; nothing else. The command then runs without a single privilege, and
# when this process ends, the kernel ends all of them.
set -eu
root=$1 folder=$2
shift 2

bind() { # what, and options of mount: the same place in the cell as outside, a link as what it points to
  [ -e "$1" ] || return 0
  if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root$(dirname "$1")" && : >"$root$1"; fi
  mount --bind "$1" "$root$1"
  [ "$2" = rw ] || mount -o "remount,bind,$2" "$root$1"
}

mount --make-rprivate /
ip link set lo up
mount -t tmpfs -o size=64m,mode=755 cell "$root"
mkdir -p "$root/dev/shm" "$root/proc" "$root/tmp" "$root/old"
mount -t tmpfs -o size=256m cell "$root/dev/shm"
mount -t tmpfs -o size=64m cell "$root/tmp"
for path in /usr /etc/alternatives /etc/hosts /etc/ld.so.cache /etc/nsswitch.conf /etc/passwd /etc/localtime; do
  bind $path ro
done
for path in /bin /sbin /lib /lib32 /lib64; do # links into /usr on most systems
  if [ -L $path ]; then cp -P $path "$root$path"; else bind $path ro; fi
done
while [ "$1" != -- ]; do
  bind "$1" ro
  shift
done
shift
bind "$folder" ro
bind "$folder/tmp" rw
for device in null zero full random urandom; do bind /dev/$device rw; done
ln -s /proc/self/fd "$root/dev/fd"
mount -t proc cell "$root/proc"
echo 0 >"$root/proc/sys/user/max_user_namespaces" # no namespaces inside these
for path in /proc/sys /proc/sysrq-trigger /proc/irq /proc/bus; do
  [ ! -e "$root$path" ] || { mount --bind "$root$path" "$root$path" && mount -o remount,bind,ro "$root$path"; }
done
cd "$root"
pivot_root . old
umount -l /old
rmdir /old
mount -o remount,ro /
cd "$folder/tmp"
setpriv --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@"
