use std::{
    arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count, _xgetbv},
    },
    sync::LazyLock,
};

use super::{Start, VECTOR, generic::Raw};

/// Rows, and bytes of a row, of a tile register; its columns are words.
const TILE: usize = 16;

/// Whether the machine has AMX tiles of bf16 and the operating system lets this process use them.
pub(in super::super) fn is_usable() -> bool {
    static USABLE: LazyLock<bool> = LazyLock::new(|| is_present() && request_tiles());
    *USABLE
}

fn is_present() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const TILE_STATE: u64 = 0b11 << 17;
    const OSXSAVE: u32 = 1 << 27;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let features = __cpuid_count(7, 0).edx;
    // SAFETY: with OSXSAVE set, XGETBV is there.
    let state = unsafe { read_state() };
    features & AMX_BF16 != 0 && features & AMX_TILE != 0 && state & TILE_STATE == TILE_STATE
}

#[target_feature(enable = "xsave")]
fn read_state() -> u64 {
    // SAFETY: register 0 is there wherever the instruction is.
    unsafe { _xgetbv(0) }
}

/// Linux hands the tiles to a process that asks for them.
#[cfg(target_os = "linux")]
fn request_tiles() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let result: i64;
    // SAFETY: a system call with integer arguments that touches no memory of ours; the kernel clobbers rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_tiles() -> bool {
    false
}

/// All eight tile registers as 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; TILE],
    rows: [u8; TILE],
}

static WHOLE_TILES: Configuration = {
    let (mut row_bytes, mut rows) = ([0; TILE], [0; TILE]);
    let mut tile = 0;
    while tile < 8 {
        row_bytes[tile] = 64;
        rows[tile] = 16;
        tile += 1;
    }
    Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes,
        rows,
    }
};

/// # Safety
///
/// The pointers of `raw` reach as many elements as its sizes say, `m` and `k` are multiples of 32 and 16, and
/// [`is_usable`].
pub(in super::super) unsafe fn multiply(raw: &Raw) {
    debug_assert!(raw.m.is_multiple_of(2 * TILE) && raw.k.is_multiple_of(TILE));
    // SAFETY: AMX is usable, as the caller promises, and the configuration is valid for palette 1.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE_TILES, options(nostack, readonly)) }
    for row in (0..raw.m).step_by(2 * TILE) {
        let mut lane = 0;
        while lane < raw.lanes {
            let wide = raw.lanes - lane >= 2 * VECTOR;
            // SAFETY: these 32 rows and 16 or 32 lanes are in A, B and C, as the caller promises.
            unsafe {
                if wide {
                    square(raw, row, lane);
                } else {
                    column(raw, row, lane);
                }
            }
            lane += if wide { 2 * VECTOR } else { VECTOR };
        }
    }
    // SAFETY: AMX is usable; tiles are not used beyond this function.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

macro_rules! tiles {
    ($raw:ident, $row:ident, $lane:ident, load: [$($load:literal)*], zero: [$($zero:literal)*], step: [$($step:literal)*], store: [$($store:literal)*]) => {{
        let c = $raw.c.wrapping_add($row * $raw.c_row + $lane);
        let c_row = $raw.c_row * 4;
        let a = $raw.a.wrapping_add($row * $raw.a_row);
        let b_row = $raw.lanes * 4;
        // SAFETY: reads 16 rows of 64 bytes of A and of B for every 16 words of k, and reads and writes 16 rows of 64 bytes at a time of
        // C, all of them within, as the caller promises. Clobbers tile registers alone, which are configured.
        unsafe {
            asm!(
                "test {add}, {add}", "jz 2f",
                $($load),*,
                "jmp 3f",
                "2:", $($zero),*,
                "3:", $($step),*,
                "add {a}, 64", "add {a1}, 64", "add {b}, {b_tile}", "dec {k}", "jnz 3b",
                $($store),*,
                add = in(reg) u64::from($raw.start != Start::Zero),
                a = inout(reg) a => _, a1 = inout(reg) a.wrapping_add(TILE * $raw.a_row) => _, a_row = in(reg) $raw.a_row,
                b = inout(reg) $raw.b.wrapping_add($lane) => _, b_row = in(reg) b_row, b_tile = in(reg) b_row * TILE,
                k = inout(reg) $raw.k / TILE => _,
                c = in(reg) c, c1 = in(reg) c.wrapping_byte_add(TILE * c_row), c_row = in(reg) c_row,
                options(nostack),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            );
        }
    }};
}

/// 32 rows by 32 lanes.
///
/// # Safety
///
/// That of [`multiply`], and these rows and lanes are in A, B and C.
unsafe fn square(raw: &Raw, row: usize, lane: usize) {
    tiles!(raw, row, lane,
        load: ["tileloadd tmm0, [{c} + {c_row}*1]" "tileloadd tmm1, [{c} + {c_row}*1 + 64]"
               "tileloadd tmm2, [{c1} + {c_row}*1]" "tileloadd tmm3, [{c1} + {c_row}*1 + 64]"],
        zero: ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3"],
        step: ["tileloadd tmm4, [{a} + {a_row}*1]" "tileloadd tmm6, [{b} + {b_row}*1]"
               "tdpbf16ps tmm0, tmm4, tmm6"
               "tileloadd tmm7, [{b} + {b_row}*1 + 64]"
               "tdpbf16ps tmm1, tmm4, tmm7"
               "tileloadd tmm5, [{a1} + {a_row}*1]"
               "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"],
        store: ["tilestored [{c} + {c_row}*1], tmm0" "tilestored [{c} + {c_row}*1 + 64], tmm1"
                "tilestored [{c1} + {c_row}*1], tmm2" "tilestored [{c1} + {c_row}*1 + 64], tmm3"]);
}

/// 32 rows by 16 lanes.
///
/// # Safety
///
/// That of [`multiply`], and these rows and lanes are in A, B and C.
unsafe fn column(raw: &Raw, row: usize, lane: usize) {
    tiles!(raw, row, lane,
        load: ["tileloadd tmm0, [{c} + {c_row}*1]" "tileloadd tmm2, [{c1} + {c_row}*1]"],
        zero: ["tilezero tmm0" "tilezero tmm2"],
        step: ["tileloadd tmm4, [{a} + {a_row}*1]" "tileloadd tmm6, [{b} + {b_row}*1]"
               "tdpbf16ps tmm0, tmm4, tmm6"
               "tileloadd tmm5, [{a1} + {a_row}*1]"
               "tdpbf16ps tmm2, tmm5, tmm6"],
        store: ["tilestored [{c} + {c_row}*1], tmm0" "tilestored [{c1} + {c_row}*1], tmm2"]);
}
