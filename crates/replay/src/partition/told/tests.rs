use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, ForkNumber, Lsn, PageBytes};
use walrider_redo::fsm::SLOTS_PER_PAGE;
use walrider_seed::Random;
use walrider_wal::decode::Span;
use walrider_wal::record::BKPIMAGE_APPLY;
use walrider_wal::records::xlog;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

use super::*;
use crate::spill::entry::{self, Operation};

/// A page of a map, as a file or an image has it.
fn page(values: impl Iterator<Item = (u16, u8)>) -> PageBytes {
    let mut page = [0; BLCKSZ];
    PageMut(&mut page).init(0);
    for (slot, value) in values {
        fsm::set_avail(&mut PageMut(&mut page), slot, value);
    }
    page
}

/// An operation that gives a page all its bytes, or one that does not.
fn op(key: PageKey, lsn: Lsn, image: Option<&PageBytes>) -> Op {
    let mut bytes = Vec::new();
    let record =
        RecordBuilder::new(RmgrId::XLOG, xlog::XLOG_FPI).block(0, TEST_REL, ForkNumber::FreeSpaceMap, key.block());
    let record = match image {
        Some(image) => record.image(BKPIMAGE_APPLY, 0, 0, *image),
        None => record,
    };
    let change = if image.is_some() { Change::Overwrite(0) } else { Change::Block(0) };
    entry::put(&mut bytes, Span { lsn, end: lsn }, &record.build(), &[Operation { key, change }]).unwrap();
    let mut found = None;
    entry::each(&bytes, |place, end, operation| {
        found = Some(Op { key, order: end.0, what: What::Redo(place, operation.change) });
    });
    found.unwrap()
}

/// The pages come to what they would be if each value was stored when it was told.
#[test]
fn the_last_values_are_enough() {
    walrider_seed::rounds(200, |seed| {
        let mut random = Random(seed);
        let (key, slots) = (PageKey::new(3, random.below(5) as u32), 1 + random.below(SLOTS_PER_PAGE as u64));
        let [has_values, is_there] = [(); 2].map(|()| random.below(2) == 0);
        let before = if has_values { page((0..9).map(|slot| (slot, random.below(256) as u8))) } else { [0; BLCKSZ] };
        let existing = has_values || is_there;
        let mut stock = before;
        let mut target = Target { bytes: &mut stock, exists: existing, dirty: false };
        let (mut told, mut images, mut records) = (Vec::new(), Vec::new(), MapRecords::default());
        for lsn in (1..random.below(60)).map(Lsn) {
            if random.below(20) == 0 {
                let image = page((0..50).map(|slot| (slot, random.below(256) as u8)));
                (*target.bytes, target.exists) = (image, true);
                records.note(&[op(key, lsn, Some(&image))]);
                images.push((lsn, image));
                continue;
            }
            let (slot, category) = (random.below(slots) as u16, [0, random.below(256) as u8][random.below(2) as usize]);
            fsm::record_free_space(&mut target, slot, category);
            told.push(FsmOp { key, lsn, change: FsmChange::Set { slot, category } });
        }
        let exists = target.exists;
        let mut all = Told::new(records);
        all.take(told);
        let (records, in_order, pages) = all.into_parts();
        let mut bytes = before;
        let mut target = Target { bytes: &mut bytes, exists: existing, dirty: false };
        let needed: Vec<_> = images.iter().filter(|&&(lsn, _)| !records.is_needless(key, lsn)).collect();
        assert_eq!(needed.len(), images.len().min(1));
        needed.iter().for_each(|&(_, image)| (*target.bytes, target.exists) = (*image, true));
        assert!(in_order.is_empty());
        for op in pages {
            let What::Told(page) = op.what else { panic!() };
            assert_eq!((op.key, op.order), (key, u64::MAX));
            page.record(&mut target);
        }
        assert_eq!(target.exists, exists);
        assert!(target.bytes == &stock);
    });
}

/// Where something else happens to a page, all keeps its order, and nothing is left out.
#[test]
fn what_keeps_its_order() {
    let [one, other] = [1, 2].map(|block| PageKey::new(3, block));
    let mut records = MapRecords::default();
    let image = page([(1, 1)].into_iter());
    for key in [one, other] {
        records.note(&[op(key, Lsn(10), Some(&image))]);
    }
    records.note(&[op(one, Lsn(20), None)]);
    let mut told = Told::new(records);
    let set = |key, lsn, slot| FsmOp { key, lsn: Lsn(lsn), change: FsmChange::Set { slot, category: 7 } };
    told.take(vec![set(one, 5, 1), set(one, 15, 2), set(other, 5, 3), set(other, 15, 4)]);
    let (records, in_order, pages) = told.into_parts();
    assert_eq!(in_order.iter().map(|op| (op.key, op.lsn)).collect::<Vec<_>>(), [(one, Lsn(5)), (one, Lsn(15))]);
    let pages: Vec<(PageKey, Vec<(u16, u8)>)> = pages
        .map(|op| match op.what {
            What::Told(page) => (op.key, page.values().collect()),
            _ => panic!(),
        })
        .collect();
    assert_eq!(pages, [(other, vec![(4, 7)])]);
    assert!(!records.is_needless(one, Lsn(5)) && records.is_needless(other, Lsn(5)));
    assert!(!records.is_needless(other, Lsn(10)));
}
