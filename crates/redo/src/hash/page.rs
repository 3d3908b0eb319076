//! What is special about pages of a hash index (`access/hash.h`, PostgreSQL 18).

use walrider_layout::BlockNumber;
use walrider_layout::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use walrider_layout::page::{PAGE_HEADER_SIZE, PageMut};
use walrider_wal::records::hash::InitMetaPage;

use crate::RedoError;
use crate::special::Special;

/// `hasho_flag`: in no bucket's chain.
pub const LH_UNUSED_PAGE: u16 = 0;
/// `hasho_flag`: behind a bucket's first page.
pub const LH_OVERFLOW_PAGE: u16 = 1 << 0;
/// `hasho_flag`: a bucket's first page.
pub const LH_BUCKET_PAGE: u16 = 1 << 1;
/// `hasho_flag`: tells which overflow pages are in use.
pub const LH_BITMAP_PAGE: u16 = 1 << 2;
/// `hasho_flag`: the metapage.
pub const LH_META_PAGE: u16 = 1 << 3;
/// The bits of `hasho_flag` that tell the kind of page.
pub const LH_PAGE_TYPE: u16 = LH_OVERFLOW_PAGE | LH_BUCKET_PAGE | LH_BITMAP_PAGE | LH_META_PAGE;
/// `hasho_flag`: a split has moved tuples away that are still to be deleted.
pub const LH_BUCKET_NEEDS_SPLIT_CLEANUP: u16 = 1 << 6;
/// `hasho_flag`: some line pointers may be dead.
pub const LH_PAGE_HAS_DEAD_TUPLES: u16 = 1 << 7;

/// No block (`InvalidBlockNumber`), or no bucket (`InvalidBucket`).
pub const INVALID: u32 = u32::MAX;

/// Marks the page as one of a hash index.
pub const HASHO_PAGE_ID: u16 = 0xFF80;

/// The special space (`HashPageOpaqueData`), without the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opaque {
    /// The page before, in a bucket's chain; on its first page, the last bucket at the time of the bucket's last split.
    pub prevblkno: BlockNumber,
    /// The page behind.
    pub nextblkno: BlockNumber,
    /// The bucket.
    pub bucket: u32,
    /// `LH_…`
    pub flag: u16,
}

impl Opaque {
    /// That of a page which is in no chain and no bucket.
    pub fn unchained(flag: u16) -> Opaque {
        Opaque { prevblkno: INVALID, nextblkno: INVALID, bucket: INVALID, flag }
    }
}

impl Special for Opaque {
    const SIZE: usize = 16;
    const NOT_ONE: &'static str = "not a page of a hash index";

    fn read(bytes: &[u8]) -> Option<Opaque> {
        (u16_at(bytes, 14) == HASHO_PAGE_ID).then(|| Opaque {
            prevblkno: u32_at(bytes, 0),
            nextblkno: u32_at(bytes, 4),
            bucket: u32_at(bytes, 8),
            flag: u16_at(bytes, 12),
        })
    }

    fn store(&self, bytes: &mut [u8]) {
        put_u32(bytes, 0, self.prevblkno);
        put_u32(bytes, 4, self.nextblkno);
        put_u32(bytes, 8, self.bucket);
        put_u16(bytes, 12, self.flag);
        put_u16(bytes, 14, HASHO_PAGE_ID);
    }
}

/// Fills an initialised bitmap page: all bits set, all pages in use (`_hash_initbitmapbuffer`).
///
/// # Errors
/// When so many bytes do not fit.
pub fn put_bitmap(page: &mut PageMut<'_>, bmsize: u16) -> Result<(), RedoError> {
    let end = PAGE_HEADER_SIZE + usize::from(bmsize);
    if end > Opaque::AT {
        return Err(RedoError::CorruptRecord("bitmap does not fit the page"));
    }
    page.0[PAGE_HEADER_SIZE..end].fill(0xFF);
    // Else a full-page image would leave the bitmap out.
    page.set_lower(end);
    Ok(())
}

/// Sets or clears a bit of a bitmap page (`SETBIT`, `CLRBIT`).
///
/// # Errors
/// When the page has no such bit.
pub fn set_bit(page: &mut PageMut<'_>, bit: u32, in_use: bool) -> Result<(), RedoError> {
    const OUTSIDE: RedoError = RedoError::CorruptRecord("bitmap page has no such bit");
    let bitmap = &mut page.0[PAGE_HEADER_SIZE..Opaque::AT];
    let byte = bitmap.get_mut(bit as usize / 8).ok_or(OUTSIDE)?;
    let mask = 1 << (bit % 8);
    *byte = if in_use { *byte | mask } else { *byte & !mask };
    Ok(())
}

/// The contents of the metapage (`HashMetaPageData`).
pub struct Meta<'p>(&'p mut [u8]);

impl<'p> Meta<'p> {
    const NTUPLES: usize = 8;
    const MAXBUCKET: usize = 24;
    const HIGHMASK: usize = 28;
    const LOWMASK: usize = 32;
    const OVFLPOINT: usize = 36;
    const FIRSTFREE: usize = 40;
    const NMAPS: usize = 44;
    const SPARES: usize = 52;
    const MAPP: usize = Meta::SPARES + 4 * HASH_MAX_SPLITPOINTS as usize;
    /// Rounded up, for the number of tuples is one of 8 bytes.
    const SIZE: usize = (Meta::MAPP + 4 * HASH_MAX_BITMAPS as usize).next_multiple_of(8);

    /// That of this page.
    pub fn of(page: &'p mut PageMut<'_>) -> Meta<'p> {
        Meta(&mut page.0[PAGE_HEADER_SIZE..][..Meta::SIZE])
    }

    fn u32(&self, at: usize) -> u32 {
        u32_at(self.0, at)
    }

    /// `hashm_ntuples`: how many tuples the index has.
    pub fn ntuples(&self) -> f64 {
        f64::from_bits(u64_at(self.0, Meta::NTUPLES))
    }

    /// Stores `hashm_ntuples`.
    pub fn set_ntuples(&mut self, ntuples: f64) {
        put_u64(self.0, Meta::NTUPLES, ntuples.to_bits());
    }

    /// Stores `hashm_maxbucket`: the last bucket.
    pub fn set_maxbucket(&mut self, bucket: u32) {
        put_u32(self.0, Meta::MAXBUCKET, bucket);
    }

    /// `hashm_maxbucket`
    pub fn maxbucket(&self) -> u32 {
        self.u32(Meta::MAXBUCKET)
    }

    /// Stores `hashm_lowmask` and `hashm_highmask`: bits of a hash value that tell its bucket.
    pub fn set_masks(&mut self, lowmask: u32, highmask: u32) {
        put_u32(self.0, Meta::LOWMASK, lowmask);
        put_u32(self.0, Meta::HIGHMASK, highmask);
    }

    /// Stores `hashm_firstfree`: the lowest bit of an overflow page that may be free.
    pub fn set_firstfree(&mut self, bit: u32) {
        put_u32(self.0, Meta::FIRSTFREE, bit);
    }

    /// Stores `hashm_ovflpoint` and its element of `hashm_spares`: how many overflow pages there are before the buckets
    /// of this splitpoint.
    ///
    /// # Errors
    /// When there is no such splitpoint.
    pub fn set_splitpoint(&mut self, ovflpoint: u32, spares: u32) -> Result<(), RedoError> {
        let at = Meta::spares_at(ovflpoint)?;
        put_u32(self.0, at, spares);
        put_u32(self.0, Meta::OVFLPOINT, ovflpoint);
        Ok(())
    }

    /// One overflow page more at the current splitpoint.
    ///
    /// # Errors
    /// When there is no such splitpoint.
    pub fn add_spare(&mut self) -> Result<(), RedoError> {
        let at = Meta::spares_at(self.u32(Meta::OVFLPOINT))?;
        put_u32(self.0, at, self.u32(at).wrapping_add(1));
        Ok(())
    }

    fn spares_at(splitpoint: u32) -> Result<usize, RedoError> {
        if splitpoint >= HASH_MAX_SPLITPOINTS {
            return Err(RedoError::CorruptPage("metapage of a hash index has no such splitpoint"));
        }
        Ok(Meta::SPARES + 4 * splitpoint as usize)
    }

    /// One bitmap page more, this one (`hashm_mapp`, `hashm_nmaps`).
    ///
    /// # Errors
    /// When there are as many as can be.
    pub fn add_bitmap(&mut self, block: BlockNumber) -> Result<(), RedoError> {
        let count = self.u32(Meta::NMAPS);
        if count >= HASH_MAX_BITMAPS {
            return Err(RedoError::CorruptPage("metapage of a hash index has no room for a bitmap page"));
        }
        put_u32(self.0, Meta::MAPP + 4 * count as usize, block);
        put_u32(self.0, Meta::NMAPS, count + 1);
        Ok(())
    }
}

/// Fills an initialised metapage (`_hash_init_metabuffer`).
pub fn put_meta(page: &mut PageMut<'_>, init: &InitMetaPage) {
    const HASH_MAGIC: u32 = 0x0644_0640;
    const HASH_VERSION: u32 = 4;
    /// `HashGetMaxBitmapSize`
    const BSIZE: u16 = (Opaque::AT - PAGE_HEADER_SIZE) as u16;
    /// Bits of a bitmap page, the largest power of 2 that fits: as an exponent of bytes.
    const BMSIZE_LOG2: u32 = BSIZE.ilog2();

    // At least 2, at most 2^30 buckets, and as many as are allocated together.
    let wanted = init.num_tuples / f64::from(init.ffactor);
    let buckets = if wanted <= 2.0 {
        2
    } else if wanted >= f64::from(1u32 << 30) {
        1 << 30
    } else {
        total_buckets(spare_index(wanted as u32))
    };
    let splitpoint = spare_index(buckets);
    let highmask = (buckets + 1).next_power_of_two() - 1;

    let mut meta = Meta::of(page);
    put_u32(meta.0, 0, HASH_MAGIC);
    put_u32(meta.0, 4, HASH_VERSION);
    put_u16(meta.0, 16, init.ffactor);
    put_u16(meta.0, 18, BSIZE);
    put_u16(meta.0, 20, 1 << BMSIZE_LOG2);
    put_u16(meta.0, 22, BMSIZE_LOG2 as u16 + 3);
    meta.set_maxbucket(buckets - 1);
    meta.set_masks(highmask >> 1, highmask);
    put_u32(meta.0, 48, init.procid);
    // One overflow page, the first bitmap page. Splitpoints of at most 2^30 buckets are all there.
    put_u32(meta.0, Meta::SPARES + 4 * splitpoint as usize, 1);
    put_u32(meta.0, Meta::OVFLPOINT, splitpoint);
    // Else a full-page image would leave the metadata out.
    page.set_lower(PAGE_HEADER_SIZE + Meta::SIZE);
}

/// Most bitmap pages that an index may have.
const HASH_MAX_BITMAPS: u32 = 1024;
/// Groups of buckets that are allocated in one phase, groups in all, and phases of each group behind those.
const HASH_SPLITPOINT_GROUPS_WITH_ONE_PHASE: u32 = 10;
const HASH_MAX_SPLITPOINT_GROUP: u32 = 32;
const HASH_SPLITPOINT_PHASE_BITS: u32 = 2;
const HASH_SPLITPOINT_PHASE_MASK: u32 = (1 << HASH_SPLITPOINT_PHASE_BITS) - 1;
/// Phases in which buckets may be allocated.
const HASH_MAX_SPLITPOINTS: u32 = HASH_SPLITPOINT_GROUPS_WITH_ONE_PHASE
    + ((HASH_MAX_SPLITPOINT_GROUP - HASH_SPLITPOINT_GROUPS_WITH_ONE_PHASE) << HASH_SPLITPOINT_PHASE_BITS);

/// The phase in which the last of so many buckets is allocated, for at most 2^30 of them (`_hash_spareindex`).
fn spare_index(buckets: u32) -> u32 {
    let last = buckets.saturating_sub(1);
    // `pg_ceil_log2_32`
    let group = u32::BITS - last.leading_zeros();
    if group < HASH_SPLITPOINT_GROUPS_WITH_ONE_PHASE {
        return group;
    }
    let before = group - HASH_SPLITPOINT_GROUPS_WITH_ONE_PHASE;
    let within = last >> (group - (HASH_SPLITPOINT_PHASE_BITS + 1)) & HASH_SPLITPOINT_PHASE_MASK;
    HASH_SPLITPOINT_GROUPS_WITH_ONE_PHASE + (before << HASH_SPLITPOINT_PHASE_BITS) + within
}

/// How many buckets are allocated up to this phase (`_hash_get_totalbuckets`).
fn total_buckets(phase: u32) -> u32 {
    let Some(behind) = phase.checked_sub(HASH_SPLITPOINT_GROUPS_WITH_ONE_PHASE) else { return 1 << phase };
    let group = HASH_SPLITPOINT_GROUPS_WITH_ONE_PHASE + (behind >> HASH_SPLITPOINT_PHASE_BITS);
    let before = 1 << (group - 1);
    let phases = (behind & HASH_SPLITPOINT_PHASE_MASK) + 1;
    before + (before >> HASH_SPLITPOINT_PHASE_BITS) * phases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_allocated_in_groups_and_then_in_quarters_of_groups() {
        let allocated = |buckets| total_buckets(spare_index(buckets));
        assert_eq!([1, 2, 3, 4, 5, 512].map(allocated), [1, 2, 4, 4, 8, 512]);
        assert_eq!([513, 640, 641, 768, 769, 1024].map(allocated), [640, 640, 768, 768, 896, 1024]);
        assert_eq!(allocated(1 << 30), 1 << 30);
        assert_eq!([512, 513, 1024, 1025, 1 << 30].map(spare_index), [9, 10, 13, 14, 93]);
    }

    #[test]
    fn the_metapage_is_as_large_as_its_structure() {
        assert_eq!((Meta::MAPP, Meta::SIZE), (444, 4544));
    }
}
