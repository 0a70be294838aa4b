#!/usr/bin/env bash
# Runs the kernels' tests on an emulated processor with AVX-512 and VNNI: a
# Linux kernel boots in Bochs, whose first program is the tests.
#
#   scripts/avx512.sh [WORK_DIR]
#
# Exits with 0 if all tests passed there, otherwise with 1. For machines that
# have no AVX-512; on others `make test` covers that path. Needs Debian or
# Ubuntu on x86-64, a Rust toolchain and, to install what is missing, root.
# WORK_DIR (default: target/avx512) keeps the kernel and the console's text.
# The processor is emulated: this says nothing about speed.
#
# CASES: cases of the property test (default 20).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mkdir -p "${1:-target/avx512}" && cd "${1:-target/avx512}" && pwd)

fail() {
    echo "avx512.sh: $*" >&2
    exit 1
}

[ "$(uname -m)" = x86_64 ] || fail "this machine is $(uname -m); x86_64 is needed"
command -v apt-get >/dev/null || fail "apt-get is missing; Debian or Ubuntu is needed"

# bochs-term stands for any screen: none is used, and another would bring X.
packages=(bochs bochsbios bochs-term vgabios busybox-static isolinux syslinux-common xorriso cpio)
missing=()
for package in "${packages[@]}"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" -eq 0 ] || fail "missing: ${missing[*]}. As root: apt-get install ${missing[*]}"
    echo "Installing ${missing[*]}" >&2
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "${missing[@]}" >&2
fi

# The kernel is only unpacked, not installed.
if ! ls "$work"/kernel/boot/vmlinuz-* >/dev/null 2>&1; then
    image=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2 }')
    [ -n "$image" ] || fail "apt knows no linux-image-cloud-amd64; try apt-get update"
    (cd "$work" && apt-get download -qq "$image" && dpkg -x "$image"_*.deb kernel && rm "$image"_*.deb)
fi

# The same programs as in `make test`, and the libraries that they load.
root=$work/root
rm -rf "$root" "$work/iso"
mkdir -p "$root"/{bin,dev,proc} "$work/iso"
cp /bin/busybox "$root/bin/"
for test in bits reference; do
    program=$(cargo test --release --workspace --test "$test" --no-run --message-format=json |
        grep -o '"executable":"[^"]*"' | cut -d'"' -f4)
    cp "$program" "$root/$test"
    for library in $(ldd "$program" | grep -o '/[^ ]*'); do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
done

cat >"$root/init" <<END
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox grep -q avx512_vnni /proc/cpuinfo && echo "AVX-512 VNNI: yes"
export PROPTEST_CASES=${CASES:-20} OMP_WAIT_POLICY=passive
/reference --test-threads=1 && /bits --test-threads=1 && echo "ALL PASSED"
# The console is slow. The end of this program is a panic, upon which Linux
# restarts by a triple fault, which ends Bochs.
/bin/busybox sleep 2
END
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) >"$work/iso/initrd"

# Bochs 2.7 reports sizes of the compact XSAVE format that Linux finds wrong,
# and a kernel that uses the others of these features hangs in it.
cp "$work"/kernel/boot/vmlinuz-* "$work/iso/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$work/iso/"
cat >"$work/iso/isolinux.cfg" <<'END'
default tests
label tests
 kernel vmlinuz
 append initrd=initrd console=ttyS0 quiet panic=-1 reboot=t acpi=off nokaslr mitigations=off tsc=reliable nowatchdog clearcpuid=pku,xsavec,xsaves,pcid,invpcid,fsgsbase,smap,umip,erms,fsrm
END
xorriso -as mkisofs -quiet -o "$work/tests.iso" -b isolinux.bin -c boot.cat \
    -no-emul-boot -boot-load-size 4 -boot-info-table "$work/iso" 2>/dev/null

cat >"$work/bochsrc" <<END
cpu: model=corei7_icelake_u, ips=100000000, reset_on_triple_fault=0
memory: guest=512, host=512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
display_library: rfb, options="timeout=0"
ata0-master: type=cdrom, path=$work/tests.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/console.txt
log: $work/bochs.log
panic: action=fatal
error: action=ignore
END
echo c >"$work/continue" # Debian's Bochs has its debugger on
rm -f "$work/console.txt"
echo "Booting; the tests' output comes at the end ($work/console.txt)" >&2
timeout 3600 bochs -q -f "$work/bochsrc" -rc "$work/continue" </dev/null >"$work/bochs.out" 2>&1 || true

[ -f "$work/console.txt" ] || fail "the kernel has not started; see $work/bochs.out"
tr -d '\r' <"$work/console.txt"
grep -q "AVX-512 VNNI: yes" "$work/console.txt" || fail "the emulated processor has no AVX-512"
grep -q "ALL PASSED" "$work/console.txt" || fail "tests failed, or have not ended; see $work/console.txt"
