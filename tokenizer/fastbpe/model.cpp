#include "model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <unordered_map>

namespace fastbpe {

namespace {

size_t power_of_two(size_t at_least) {
    size_t power = 1;
    while (power < at_least) power *= 2;
    return power;
}

std::string named(uint32_t id) { return "piece " + std::to_string(id); }

struct Character {
    Spelling spelling;
    uint32_t code, begin, end;  // bytes [begin, end) of the piece
};

std::vector<Character> characters_of(std::string_view piece, uint32_t id) {
    std::vector<Character> found;
    const auto* bytes = reinterpret_cast<const uint8_t*>(piece.data());
    for (uint32_t begin = 0; begin < piece.size();) {
        Spelling spelling;
        const uint32_t length = read_character(bytes + begin, bytes + piece.size(), &spelling);
        if (length == 0) throw BadModel(named(id) + " is not UTF-8");
        found.push_back({spelling, code_point(spelling, length), begin, begin + length});
        begin += length;
    }
    return found;
}

// The byte that a piece <0xNN> stands for.
uint8_t byte_of(std::string_view piece, uint32_t id) {
    constexpr std::string_view kDigits = "0123456789ABCDEF";
    if (piece.size() == 6 && piece.substr(0, 3) == "<0x" && piece[5] == '>') {
        const size_t high = kDigits.find(piece[3]), low = kDigits.find(piece[4]);
        if (high < 16 && low < 16) return static_cast<uint8_t>(high << 4 | low);
    }
    throw BadModel(named(id) + " is of type byte and not of the form <0xNN>");
}

// A number that grows as the score does. Zero stands above minus zero, as it does for SentencePiece.
uint32_t ordered(float score) {
    uint32_t bits;
    static_assert(sizeof bits == sizeof score);
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

// Rank of every normal piece, 0 for the highest score; kNoRank for the others.
std::vector<uint32_t> ranks_of(const Vocabulary& vocabulary) {
    std::vector<uint32_t> scores;
    for (uint32_t id = 0; id < vocabulary.size; id++) {
        if (vocabulary.types[id] != kNormal) continue;
        if (!std::isfinite(vocabulary.scores[id])) {
            throw BadModel("the score of " + named(id) + " is not finite");
        }
        scores.push_back(ordered(vocabulary.scores[id]));
    }
    std::sort(scores.begin(), scores.end(), std::greater<>());
    scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
    std::vector<uint32_t> ranks(vocabulary.size, kNoRank);
    for (uint32_t id = 0; id < vocabulary.size; id++) {
        if (vocabulary.types[id] != kNormal) continue;
        const uint32_t score = ordered(vocabulary.scores[id]);
        const auto place = std::lower_bound(scores.begin(), scores.end(), score, std::greater<>());
        ranks[id] = static_cast<uint32_t>(place - scores.begin());
    }
    return ranks;
}

}  // namespace

void Merges::build(const std::vector<Rule>& rules) {
    rules_.assign(power_of_two(2 * rules.size() + 2), Rule{kFree, kNone});
    mask_ = rules_.size() - 1;
    for (const Rule& rule : rules) {
        size_t i = home(rule.symbols);
        while (rules_[i].symbols != kFree) i = (i + 1) & mask_;
        rules_[i] = rule;
    }
}

void Characters::set(uint32_t code, uint32_t piece) {
    uint16_t& page = page_of_[code >> 8];
    if (page == 0) {
        page = static_cast<uint16_t>(pages_.size() >> 8);
        pages_.resize(pages_.size() + 256, kNoPiece);
    }
    pages_[static_cast<size_t>(page) << 8 | (code & 0xFF)] = piece;
}

void Neighbours::build(std::vector<uint64_t> pairs) {
    constexpr Spelling kMarkSpelling = 0x8196E2;  // U+2581
    for (size_t i = 0, count = pairs.size(); i < count; i++) {
        const auto left = static_cast<Spelling>(pairs[i] >> 32), right = static_cast<Spelling>(pairs[i]);
        const Spelling other_left = left == kMarkSpelling ? kSpace : left;
        const Spelling other_right = right == kMarkSpelling ? kSpace : right;
        pairs.push_back(static_cast<uint64_t>(other_left) << 32 | right);
        pairs.push_back(static_cast<uint64_t>(left) << 32 | other_right);
        pairs.push_back(static_cast<uint64_t>(other_left) << 32 | other_right);
    }
    std::sort(pairs.begin(), pairs.end());
    pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());

    // 32 to 64 bits a pair: at most 3 % of the possible cuts are missed. From 4 KiB to 1 MiB.
    const size_t bits = std::clamp<size_t>(power_of_two(32 * pairs.size()), 1u << 15, 1u << 23);
    shift_ = 64 - __builtin_ctzll(bits);
    filter_.assign(bits / 64, 0);
    ascii_cuts_.assign(128 * 128, 1);
    for (const uint64_t pair : pairs) {
        const auto left = static_cast<Spelling>(pair >> 32), right = static_cast<Spelling>(pair);
        const uint64_t bit = hash(left, right) >> shift_;
        filter_[bit >> 6] |= 1ull << (bit & 63);
        if (left < 128 && right < 128) ascii_cuts_[left << 7 | right] = 0;
    }
}

Model::Model(const Vocabulary& vocabulary)
    : size(vocabulary.size), byte_fallback(vocabulary.byte_fallback), dummy_prefix(vocabulary.dummy_prefix) {
    std::unordered_map<std::string_view, uint32_t> normal;
    uint32_t unknowns = 0;
    std::set<std::string_view> bytes;
    normal.reserve(size);
    for (uint32_t id = 0; id < size; id++) {
        const std::string_view piece = vocabulary.piece(id);
        if (piece.size() > kMaxPieceBytes) throw BadModel(named(id) + " has more than 1024 bytes");
        switch (vocabulary.types[id]) {
            case kNormal:
                if (piece.empty()) throw BadModel(named(id) + " is empty");
                if (!normal.emplace(piece, id).second) throw BadModel(named(id) + " is there twice");
                break;
            case kUnknown:
                unknown_id = id;
                unknowns++;
                break;
            case kByte:
                byte_ids[byte_of(piece, id)] = id;
                bytes.insert(piece);
                break;
            case kControl:
                break;
            default:
                throw BadModel(named(id) + " is of a type that is not supported");
        }
    }
    if (unknowns != 1) throw BadModel(std::to_string(unknowns) + " unknown pieces");
    if (bytes.size() != (byte_fallback ? 256u : 0u)) throw BadModel(std::to_string(bytes.size()) + " byte pieces");

    std::vector<std::vector<Character>> spelled(size);
    std::vector<uint64_t> pairs;
    for (const auto& [piece, id] : normal) {
        spelled[id] = characters_of(piece, id);
        if (spelled[id].size() == 1) characters.set(spelled[id][0].code, id);
        for (size_t i = 1; i < spelled[id].size(); i++) {
            pairs.push_back(static_cast<uint64_t>(spelled[id][i - 1].spelling) << 32 | spelled[id][i].spelling);
        }
    }
    neighbours.build(std::move(pairs));

    // A piece is made of two symbols wherever it can be split into two that exist.
    const auto symbol_of = [&](std::string_view part, uint32_t first_code, size_t count, Symbol* symbol) {
        const auto found = normal.find(part);
        if (found == normal.end() && count > 1) return false;
        *symbol = found == normal.end() ? kNoPiece | first_code : found->second;
        return true;
    };
    const std::vector<uint32_t> ranks = ranks_of(vocabulary);
    std::vector<Merges::Rule> rules;
    for (const auto& [piece, id] : normal) {
        const std::vector<Character>& letters = spelled[id];
        for (size_t i = 1; i < letters.size(); i++) {
            Symbol left, right;
            const uint32_t cut = letters[i].begin;
            if (symbol_of(piece.substr(0, cut), letters[0].code, i, &left) &&
                symbol_of(piece.substr(cut), letters[i].code, letters.size() - i, &right)) {
                rules.push_back({Merges::key(left, right), {ranks[id], id}});
            }
        }
    }
    merges.build(rules);
}

}  // namespace fastbpe
