//! From pages to records, on WAL that is made here.

use std::io::Read;

use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, Major, TimelineId, XLOG_BLCKSZ};
use walrider_wal::decode::{Invalid, Status, Stretch, WalFormat};
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::RecordBuilder;
use walrider_wal::testing::pages::WalBuilder;

const PAGE: u64 = XLOG_BLCKSZ as u64;
const TIMELINE: TimelineId = TimelineId(1);
const START: Lsn = Lsn(5 << 20);

fn size() -> SegmentSize {
    SegmentSize::new(1 << 20).unwrap()
}

fn format() -> WalFormat {
    let system_identifier = Some(WalBuilder::SYSTEM_IDENTIFIER);
    WalFormat { major: Major::V18, segment_size: size(), system_identifier }
}

fn record(len: usize) -> RecordBuilder {
    RecordBuilder::new(RmgrId::XLOG, 0x20).main_data(vec![len as u8; len])
}

/// WAL with records of these lengths of main data, and where they begin.
fn wal(lens: impl IntoIterator<Item = usize>) -> (WalBuilder, Vec<Lsn>) {
    let mut wal = WalBuilder::new(size(), TIMELINE, START);
    let lsns = lens.into_iter().map(|len| wal.record(record(len))).collect();
    (wal, lsns)
}

/// Puts whole pages behind those that are there.
fn append(stretch: &mut Stretch, mut pages: &[u8]) {
    let from = stretch.filled();
    let got = pages.read_vectored(&mut stretch.room(pages.len() / XLOG_BLCKSZ)).unwrap();
    stretch.filled_up_to(Lsn(from.0 + got as u64));
}

/// Decodes all of `bytes`, which begin at `START`, as one stretch.
fn decode(bytes: &[u8]) -> (Vec<Lsn>, Status) {
    let mut stretch = Stretch::new();
    stretch.reset(START, false, Lsn(START.0 + bytes.len() as u64), size());
    append(&mut stretch, bytes);
    let mut spans = Vec::new();
    let status = stretch.decode_each(&format(), TIMELINE, |found| spans.push(found.span));
    // What is computed from where a record is in memory is what decoding saw.
    assert_eq!(stretch.places().iter().map(|&place| stretch.span(place)).collect::<Vec<_>>(), spans);
    (stretch.places().iter().map(|&place| stretch.span(place).lsn).collect(), status)
}

/// Decodes in stretches of `window` bytes, each with no more pages than it asks for.
fn decode_in_windows(bytes: &[u8], window: u64) -> Vec<Lsn> {
    let (mut lsns, mut last) = (Vec::new(), Lsn::INVALID);
    let (mut stretch, end) = (Stretch::new(), Lsn(START.0 + bytes.len() as u64));
    for from in (START.0..end.0).step_by(window as usize) {
        let limit = Lsn(from + window).min(end);
        stretch.reset(Lsn(from), false, limit, size());
        let (mut upto, mut spans) = (limit, Vec::new());
        loop {
            let have = stretch.filled();
            let more = &bytes[(have.0 - START.0) as usize..(upto.0.min(end.0) - START.0) as usize];
            append(&mut stretch, more);
            match stretch.decode_each(&format(), TIMELINE, |found| spans.push(found.span)) {
                Status::NeedPages { upto: wanted } if wanted <= end => upto = wanted,
                _ => break,
            }
        }
        assert_eq!(stretch.follows(last), Ok(()), "at {}", Lsn(from));
        assert_eq!(stretch.places().iter().map(|&place| stretch.span(place)).collect::<Vec<_>>(), spans);
        lsns.extend(spans.iter().map(|span| span.lsn));
        last = lsns.last().copied().unwrap_or(last);
    }
    lsns
}

/// Lengths that put record headers and ends at every place around page borders.
fn awkward_lens() -> Vec<usize> {
    let mut lens: Vec<usize> = (0..700).map(|n| (n * 37) % 211).collect();
    lens.extend([8000, 8100, 8144, 8152, 16_000, 30_000, 1, 100_000, 0, 1_200_000, 3]);
    lens.extend((0..200).map(|n| 8100 + n));
    lens
}

#[test]
fn records_are_found_however_the_wal_is_cut_into_stretches() {
    let (wal, lsns) = wal(awkward_lens());
    let bytes = wal.bytes();
    assert!(bytes.len() > 2 << 20, "crosses segments");
    let (whole, status) = decode(&bytes);
    assert_eq!(whole, lsns);
    assert!(matches!(status, Status::Invalid { at, why: Invalid::RecordLength(0), .. } if at == wal.position()));
    for window in [PAGE, 3 * PAGE, 128 * PAGE] {
        assert_eq!(decode_in_windows(&bytes, window), lsns, "window {window}");
    }
}

#[test]
fn contents_survive_the_way_through_pages() {
    let (wal, _) = wal([20_000, 5]);
    let bytes = wal.bytes();
    let mut stretch = Stretch::new();
    stretch.reset(START, false, Lsn(START.0 + bytes.len() as u64), size());
    append(&mut stretch, &bytes);
    stretch.decode(&format(), TIMELINE);
    let &[long, short] = stretch.places() else { panic!("two records") };
    let mut parsed = walrider_wal::record::Record::empty(Major::V18);
    stretch.read(long, &mut parsed).unwrap();
    assert_eq!(parsed.main_data, vec![20_000_usize as u8; 20_000]);
    assert_eq!(stretch.span(long).end, stretch.span(short).lsn);
}

#[test]
fn wal_that_is_cut_off_asks_for_more() {
    let (wal, lsns) = wal([30_000, 10, 9000]);
    let bytes = wal.bytes();
    for pages in 0..bytes.len() / XLOG_BLCKSZ {
        let cut = &bytes[..pages * XLOG_BLCKSZ];
        let mut stretch = Stretch::new();
        stretch.reset(START, false, Lsn(START.0 + bytes.len() as u64), size());
        append(&mut stretch, cut);
        let status = stretch.decode(&format(), TIMELINE);
        let whole =
            lsns.iter().filter(|lsn| stretch.places().iter().any(|&place| stretch.span(place).lsn == **lsn)).count();
        assert_eq!(stretch.places().len(), whole);
        if pages > 0 {
            let asked = matches!(status, Status::NeedPages { upto } if upto > stretch.filled());
            assert!(asked, "{pages} pages: {status:?}");
        }
    }
}

/// Up to a gigabyte was read into memory before the first page that goes on could say that the length is wrong.
#[test]
fn a_length_is_believed_once_two_pages_agree() {
    let (wal, lsns) = wal([30_000]);
    let mut bytes = wal.bytes();
    let at = (lsns[0].0 - START.0) as usize;
    let wanted = |bytes: &[u8], pages: usize| {
        let mut stretch = Stretch::new();
        stretch.reset(START, false, Lsn(START.0 + (1 << 30)), size());
        append(&mut stretch, &bytes[..pages * XLOG_BLCKSZ]);
        stretch.decode(&format(), TIMELINE)
    };
    let page = |nth: u64| Lsn(START.0 + nth * PAGE);
    assert_eq!(wanted(&bytes, 1), Status::NeedPages { upto: page(2) });
    assert_eq!(wanted(&bytes, 2), Status::NeedPages { upto: page(4) });
    bytes[at + 3] |= 0x3F;
    assert_eq!(wanted(&bytes, 1), Status::NeedPages { upto: page(2) });
    assert!(matches!(wanted(&bytes, 2), Status::Invalid { why: Invalid::ContinuationLength(..), .. }));
}

#[test]
fn a_flipped_bit_never_makes_a_record() {
    let (wal, lsns) = wal([100, 9000, 33, 0, 50]);
    let bytes = wal.bytes();
    let used = (wal.position().0 - START.0) as usize;
    for at in 0..used {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        let (found, _) = decode(&flipped);
        // Nothing appears that was not written, and what ends before the damage is found unless its first page is bad.
        assert!(lsns.starts_with(&found), "byte {at}: {found:?}");
        let page = (at - at % XLOG_BLCKSZ) as u64;
        let before = lsns.iter().skip(1).filter(|lsn| lsn.0 - START.0 <= page).count();
        assert!(found.len() >= before, "byte {at}: {found:?}");
    }
}

#[test]
fn a_record_that_was_overwritten_is_passed_over() {
    let (mut wal, mut lsns) = wal([10, 20]);
    let cut = wal.cut_record(record(20_000));
    lsns.push(wal.record(record(30)));
    let another = wal.cut_record(record(20_000));
    lsns.push(wal.record(record(40)));
    let bytes = wal.bytes();
    let (found, _) = decode(&bytes);
    assert_eq!(found, lsns);
    let mut stretch = Stretch::new();
    stretch.reset(START, false, Lsn(START.0 + bytes.len() as u64), size());
    append(&mut stretch, &bytes);
    stretch.decode(&format(), TIMELINE);
    assert_eq!(stretch.overwritten(), [cut, another]);
}

#[test]
fn a_switch_goes_on_in_the_next_segment() {
    let (mut wal, mut lsns) = wal([10]);
    lsns.push(wal.switch());
    lsns.push(wal.record(record(20)));
    assert_eq!(lsns[2], Lsn((6 << 20) + 40));
    let bytes = wal.bytes();
    assert_eq!(decode(&bytes).0, lsns);
    let mut stretch = Stretch::new();
    stretch.reset(START, false, Lsn(START.0 + bytes.len() as u64), size());
    append(&mut stretch, &bytes);
    stretch.decode(&format(), TIMELINE);
    let [_, switch, last] = stretch.places()[..] else { panic!("three records") };
    assert_eq!((stretch.used(switch).end, stretch.span(switch).end), (Lsn(lsns[1].0 + 24), Lsn(6 << 20)));
    assert_eq!(stretch.used(last), stretch.span(last));
}

#[test]
fn pages_of_another_place_cluster_or_timeline_are_refused() {
    let (wal, _) = wal([9000]);
    let bytes = wal.bytes();
    let why = |at: usize, value: u8| {
        let mut other = bytes.clone();
        other[at] ^= value;
        match decode(&other) {
            (_, Status::Invalid { why, .. }) => why,
            (_, status) => panic!("{status:?}"),
        }
    };
    assert!(matches!(why(0, 1), Invalid::Magic { .. }));
    assert_eq!(
        why(0, 0x18 ^ 0x16).to_string(),
        "invalid magic number D116 in WAL page header (that of PostgreSQL 17), expected D118 (that of PostgreSQL 18)"
    );
    assert!(matches!(why(3, 0x80), Invalid::PageInfo(_)));
    assert_eq!(why(4, 2), Invalid::Timeline(TimelineId(3)));
    assert!(matches!(why(24, 1), Invalid::SystemIdentifier { .. }));
    assert!(matches!(why(34, 0x30), Invalid::SegmentSize(_)));
    assert!(matches!(why(37, 0x60), Invalid::PageSize(_)));
    assert!(matches!(why(XLOG_BLCKSZ + 8 + 3, 1), Invalid::PageAddress(_)));
    assert!(matches!(why(XLOG_BLCKSZ + 16, 1), Invalid::ContinuationLength(..)));
    assert!(matches!(why(XLOG_BLCKSZ + 2, 1), Invalid::NoContinuation(_)));
}
