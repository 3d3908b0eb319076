//! Memory for cached pages: slabs of page frames.
//!
//! Slabs come from the system as zeros that cost nothing until they are touched; a box for each page would make the
//! allocator grow its heap in small steps, under a lock. Huge pages were tried: they win where the system has them ready,
//! and lose more where it must first make them. So was asking for some frames' memory at once (`MADV_POPULATE_WRITE`), which two
//! threads that did nothing else were slower with. A frame is given back for reuse; to the system they all go at once.

use walrider_layout::{BLCKSZ, PageBytes};

/// The frames of one partition.
pub struct Frames {
    slabs: Vec<Box<[u8]>>,
    slab_pages: usize,
    free: Vec<u32>,
}

impl Frames {
    /// No frames yet; they come `slab_pages` at a time.
    pub fn new(slab_pages: usize) -> Frames {
        Frames { slabs: Vec::new(), slab_pages, free: Vec::new() }
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.slabs.len() * self.slab_pages * BLCKSZ
    }

    /// A frame; its bytes are whatever they were.
    pub fn take(&mut self) -> u32 {
        if self.free.is_empty() {
            let slab = vec![0; self.slab_pages * BLCKSZ].into_boxed_slice();
            let first = (self.slabs.len() * self.slab_pages) as u32;
            self.free.extend((first..first + self.slab_pages as u32).rev());
            self.slabs.push(slab);
        }
        self.free.pop().expect("not empty")
    }

    /// Gives a frame back.
    pub fn give_back(&mut self, frame: u32) {
        debug_assert!(!self.free.contains(&frame), "frame {frame} is free already");
        self.free.push(frame);
    }

    /// Gives all memory back to the system. No frame may be in use.
    pub fn clear(&mut self) {
        assert_eq!(self.free.len(), self.slabs.len() * self.slab_pages, "some frames are in use");
        self.slabs.clear();
        self.free.clear();
    }

    fn place(&self, frame: u32) -> (usize, usize) {
        let frame = frame as usize;
        (frame / self.slab_pages, frame % self.slab_pages * BLCKSZ)
    }

    /// The bytes of a frame that was taken.
    #[inline]
    pub fn page(&self, frame: u32) -> &PageBytes {
        let (slab, at) = self.place(frame);
        self.slabs[slab][at..].first_chunk().expect("whole frames")
    }

    /// The bytes of a frame that was taken.
    #[inline]
    pub fn page_mut(&mut self, frame: u32) -> &mut PageBytes {
        let (slab, at) = self.place(frame);
        self.slabs[slab][at..].first_chunk_mut().expect("whole frames")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_apart_and_come_back() {
        let mut frames = Frames::new(3);
        let taken: Vec<u32> = (0..7).map(|_| frames.take()).collect();
        for &frame in &taken {
            frames.page_mut(frame).fill(frame as u8 + 1);
        }
        for &frame in &taken {
            assert!(frames.page(frame).iter().all(|&byte| byte == frame as u8 + 1));
        }
        frames.give_back(taken[4]);
        assert_eq!(frames.take(), taken[4]);
    }
}
