use std::fmt;

/// Instruction sets that the kernels are written for, in ascending order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Isa {
    /// Plain loops, whatever the target.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The above and AVX-512-BF16.
    Avx512Bf16,
    /// The above and AMX tiles of bf16.
    Amx,
}

impl Isa {
    #[cfg(test)]
    pub(super) const ALL: [Self; 5] = [
        Self::Portable,
        Self::Avx2,
        Self::Avx512,
        Self::Avx512Bf16,
        Self::Amx,
    ];

    /// The best that this machine has.
    pub(super) fn detect() -> Self {
        #[cfg(test)]
        if let Some(forced) = forced::get() {
            return forced;
        }
        Self::best()
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn best() -> Self {
        Self::Portable
    }

    #[cfg(target_arch = "x86_64")]
    fn best() -> Self {
        use std::arch::is_x86_feature_detected as has;
        if !(has!("avx2") && has!("fma")) {
            return Self::Portable;
        }
        let wide = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
        if !wide {
            return Self::Avx2;
        }
        if !has!("avx512bf16") {
            return Self::Avx512;
        }
        if super::kernel::amx_is_usable() {
            Self::Amx
        } else {
            Self::Avx512Bf16
        }
    }

    /// What products of experts of these sizes run on: AMX tiles are whole.
    pub(super) fn for_sizes(self, width: usize, hidden: usize) -> Self {
        const TILE: usize = 32;
        if width.is_multiple_of(TILE) && hidden.is_multiple_of(TILE) {
            self
        } else {
            self.min(Self::Avx512Bf16)
        }
    }
}

/// Functions that take an [`Isa`] before their other arguments, and whose loops the compiler vectorises for it.
macro_rules! vectorised {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident $(<$T:ident: $bound:ident>)? ($($argument:ident: $type:ty),* $(,)?) $body:block
    )*) => {$(
        $(#[$attribute])*
        #[expect(clippy::allow_attributes, reason = "few of them have many arguments")]
        #[allow(clippy::too_many_arguments)]
        $visibility fn $name $(<$T: $bound>)? (isa: Isa, $($argument: $type),*) {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body $(<$T: $bound>)? ($($argument: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn with_avx2 $(<$T: $bound>)? ($($argument: $type),*) {
                body $(::<$T>)? ($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn with_avx512 $(<$T: $bound>)? ($($argument: $type),*) {
                body $(::<$T>)? ($($argument),*)
            }

            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: only a machine that has AVX2 and FMA is given this variant.
                Isa::Avx2 => unsafe { with_avx2 $(::<$T>)? ($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: only a machine that has these AVX-512 features is given these variants.
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => unsafe { with_avx512 $(::<$T>)? ($($argument),*) },
                _ => body $(::<$T>)? ($($argument),*),
            }
        }
    )*};
}

pub(super) use vectorised;

impl Isa {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx-bf16",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Lets a test try every path that the machine has.
#[cfg(test)]
pub(super) mod forced {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::Isa;

    static FORCED: AtomicUsize = AtomicUsize::new(usize::MAX);

    pub(super) fn get() -> Option<Isa> {
        Isa::ALL.get(FORCED.load(SeqCst)).copied()
    }

    /// The instruction sets of this machine.
    pub(in super::super) fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|&isa| isa <= Isa::best())
    }

    /// All calls from now on take this path. `None`: the best one.
    pub(in super::super) fn set(isa: Option<Isa>) {
        let place = isa.and_then(|isa| Isa::ALL.iter().position(|&other| other == isa));
        FORCED.store(place.unwrap_or(usize::MAX), SeqCst);
    }
}
